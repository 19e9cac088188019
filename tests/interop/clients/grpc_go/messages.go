package main

// Messages for release 1.3 of golang/protobuf, which needs no generated code: the field numbers in
// the tags are those of tests/interop/protos/interop.proto.

type Empty struct{}

type BoolValue struct {
	Value bool `protobuf:"varint,1,opt,name=value,proto3"`
}

type Payload struct {
	Body []byte `protobuf:"bytes,2,opt,name=body,proto3"`
}

type EchoStatus struct {
	Code    int32  `protobuf:"varint,1,opt,name=code,proto3"`
	Message string `protobuf:"bytes,2,opt,name=message,proto3"`
}

type SimpleRequest struct {
	ResponseSize       int32       `protobuf:"varint,2,opt,name=response_size,proto3"`
	Payload            *Payload    `protobuf:"bytes,3,opt,name=payload,proto3"`
	ResponseCompressed *BoolValue  `protobuf:"bytes,6,opt,name=response_compressed,proto3"`
	ResponseStatus     *EchoStatus `protobuf:"bytes,7,opt,name=response_status,proto3"`
	ExpectCompressed   *BoolValue  `protobuf:"bytes,8,opt,name=expect_compressed,proto3"`
}

type SimpleResponse struct {
	Payload *Payload `protobuf:"bytes,1,opt,name=payload,proto3"`
}

type InputRequest struct {
	Payload          *Payload   `protobuf:"bytes,1,opt,name=payload,proto3"`
	ExpectCompressed *BoolValue `protobuf:"bytes,2,opt,name=expect_compressed,proto3"`
}

type InputResponse struct {
	AggregatedPayloadSize int32 `protobuf:"varint,1,opt,name=aggregated_payload_size,proto3"`
}

type Parameters struct {
	Size       int32      `protobuf:"varint,1,opt,name=size,proto3"`
	Compressed *BoolValue `protobuf:"bytes,3,opt,name=compressed,proto3"`
}

type OutputRequest struct {
	ResponseParameters []*Parameters `protobuf:"bytes,2,rep,name=response_parameters,proto3"`
	Payload            *Payload      `protobuf:"bytes,3,opt,name=payload,proto3"`
	ResponseStatus     *EchoStatus   `protobuf:"bytes,7,opt,name=response_status,proto3"`
}

type OutputResponse struct {
	Payload *Payload `protobuf:"bytes,1,opt,name=payload,proto3"`
}

// What makes a struct a message.
func (*Empty) ProtoMessage()          {}
func (*BoolValue) ProtoMessage()      {}
func (*Payload) ProtoMessage()        {}
func (*EchoStatus) ProtoMessage()     {}
func (*SimpleRequest) ProtoMessage()  {}
func (*SimpleResponse) ProtoMessage() {}
func (*InputRequest) ProtoMessage()   {}
func (*InputResponse) ProtoMessage()  {}
func (*Parameters) ProtoMessage()     {}
func (*OutputRequest) ProtoMessage()  {}
func (*OutputResponse) ProtoMessage() {}

func (*Empty) Reset()          {}
func (*BoolValue) Reset()      {}
func (*Payload) Reset()        {}
func (*EchoStatus) Reset()     {}
func (*SimpleRequest) Reset()  {}
func (*SimpleResponse) Reset() {}
func (*InputRequest) Reset()   {}
func (*InputResponse) Reset()  {}
func (*Parameters) Reset()     {}
func (*OutputRequest) Reset()  {}
func (*OutputResponse) Reset() {}

func (*Empty) String() string          { return "Empty" }
func (*BoolValue) String() string      { return "BoolValue" }
func (*Payload) String() string        { return "Payload" }
func (*EchoStatus) String() string     { return "EchoStatus" }
func (*SimpleRequest) String() string  { return "SimpleRequest" }
func (*SimpleResponse) String() string { return "SimpleResponse" }
func (*InputRequest) String() string   { return "InputRequest" }
func (*InputResponse) String() string  { return "InputResponse" }
func (*Parameters) String() string     { return "Parameters" }
func (*OutputRequest) String() string  { return "OutputRequest" }
func (*OutputResponse) String() string { return "OutputResponse" }
