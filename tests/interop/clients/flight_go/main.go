// A Flight client in Go: asks for a model's schema, then exchanges a stream of batches.
//
// Debian has no Arrow for Go, so this speaks Flight by grpc-go itself: it takes an Arrow IPC stream
// apart into FlightData, and puts the results together as another. What the bytes mean is checked by
// the test.
//
// Arguments: address, model, a file with an Arrow IPC stream, and the file for the results as
// another. Prints the schema as the bytes of an IPC message, in hexadecimal; on an error its text,
// and exits 1.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/ioutil"
	"os"
	"time"

	"google.golang.org/grpc"
)

const (
	service      = "/arrow.flight.protocol.FlightService/"
	messageBytes = 64 << 20
	deadline     = 20 * time.Second
	pathKind     = 1
	continuation = 0xFFFFFFFF
)

type FlightDescriptor struct {
	Type int32    `protobuf:"varint,1,opt,name=type,proto3"`
	Path []string `protobuf:"bytes,3,rep,name=path,proto3"`
}

type FlightInfo struct {
	Schema []byte `protobuf:"bytes,1,opt,name=schema,proto3"`
}

type FlightData struct {
	Descriptor *FlightDescriptor `protobuf:"bytes,1,opt,name=flight_descriptor,proto3"`
	Header     []byte            `protobuf:"bytes,2,opt,name=data_header,proto3"`
	Body       []byte            `protobuf:"bytes,1000,opt,name=data_body,proto3"`
}

func (*FlightDescriptor) ProtoMessage() {}
func (*FlightInfo) ProtoMessage()       {}
func (*FlightData) ProtoMessage()       {}

func (*FlightDescriptor) Reset() {}
func (*FlightInfo) Reset()       {}
func (*FlightData) Reset()       {}

func (*FlightDescriptor) String() string { return "FlightDescriptor" }
func (*FlightInfo) String() string       { return "FlightInfo" }
func (*FlightData) String() string       { return "FlightData" }

// bodyBytes reads field 3 (bodyLength) of the flatbuffer of an IPC message.
func bodyBytes(header []byte) int {
	little := binary.LittleEndian
	root := int(little.Uint32(header))
	fields := root - int(int32(little.Uint32(header[root:])))
	const slot = 4 + 2*3
	if int(little.Uint16(header[fields:])) <= slot {
		return 0
	}
	offset := int(little.Uint16(header[fields+slot:]))
	if offset == 0 {
		return 0
	}
	return int(little.Uint64(header[root+offset:]))
}

// split takes an IPC stream apart.
func split(raw []byte) ([]*FlightData, error) {
	var messages []*FlightData
	for len(raw) >= 8 {
		if binary.LittleEndian.Uint32(raw) != continuation {
			return nil, errors.New("the input is not an IPC stream")
		}
		size := int(binary.LittleEndian.Uint32(raw[4:]))
		if size == 0 {
			return messages, nil
		}
		header := raw[8 : 8+size]
		raw = raw[8+size:]
		body := raw[:bodyBytes(header)]
		raw = raw[len(body):]
		messages = append(messages, &FlightData{Header: header, Body: body})
	}
	return messages, nil
}

// join writes a message of an IPC stream; its header is padded to 8 bytes.
func join(out *bytes.Buffer, message *FlightData) {
	padding := -len(message.Header) & 7
	prefix := make([]byte, 8)
	binary.LittleEndian.PutUint32(prefix, continuation)
	binary.LittleEndian.PutUint32(prefix[4:], uint32(len(message.Header)+padding))
	out.Write(prefix)
	out.Write(message.Header)
	out.Write(make([]byte, padding))
	out.Write(message.Body)
}

func exchange(
	ctx context.Context, channel *grpc.ClientConn, descriptor *FlightDescriptor, raw []byte,
) ([]byte, error) {
	messages, err := split(raw)
	if err != nil {
		return nil, err
	}
	messages[0].Descriptor = descriptor
	about := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	stream, err := channel.NewStream(ctx, about, service+"DoExchange")
	if err != nil {
		return nil, err
	}
	// While the results are read: neither side waits for the other's windows.
	sent := make(chan error, 1)
	go func() {
		for _, message := range messages {
			if err := stream.SendMsg(message); err != nil {
				sent <- err
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	var results bytes.Buffer
	for {
		message := &FlightData{}
		if err := stream.RecvMsg(message); err == io.EOF {
			break
		} else if err != nil {
			return nil, err
		}
		join(&results, message)
	}
	return results.Bytes(), <-sent
}

func run(address, model, source, target string) error {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	channel, err := grpc.DialContext(
		ctx, address, grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageBytes)),
	)
	if err != nil {
		return err
	}
	defer channel.Close()
	descriptor := &FlightDescriptor{Type: pathKind, Path: []string{model}}
	info := &FlightInfo{}
	if err := channel.Invoke(ctx, service+"GetFlightInfo", descriptor, info); err != nil {
		return err
	}
	raw, err := ioutil.ReadFile(source)
	if err != nil {
		return err
	}
	results, err := exchange(ctx, channel, descriptor, raw)
	if err != nil {
		return err
	}
	if err := ioutil.WriteFile(target, results, 0o600); err != nil {
		return err
	}
	fmt.Print(hex.EncodeToString(info.Schema))
	return nil
}

func main() {
	if err := run(os.Args[1], os.Args[2], os.Args[3], os.Args[4]); err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
}
