package main

import (
	"context"
	"fmt"
	"io"

	"github.com/golang/protobuf/proto"
	"google.golang.org/grpc"
)

// client is a channel with the methods of the service.
type client struct{ channel *grpc.ClientConn }

func (c client) unary(
	ctx context.Context, method string, request, response proto.Message, options ...grpc.CallOption,
) error {
	return c.channel.Invoke(ctx, method, request, response, options...)
}

func (c client) largeUnary(
	ctx context.Context, request *SimpleRequest, options ...grpc.CallOption,
) error {
	response := &SimpleResponse{}
	if err := c.unary(ctx, service+"UnaryCall", request, response, options...); err != nil {
		return err
	}
	return equalBody(response.Payload, largeReceived)
}

func (c client) input(ctx context.Context, options ...grpc.CallOption) (grpc.ClientStream, error) {
	about := &grpc.StreamDesc{ClientStreams: true}
	return c.channel.NewStream(ctx, about, service+"StreamingInputCall", options...)
}

func (c client) output(ctx context.Context, request *OutputRequest) (grpc.ClientStream, error) {
	about := &grpc.StreamDesc{ServerStreams: true}
	stream, err := c.channel.NewStream(ctx, about, service+"StreamingOutputCall")
	if err != nil {
		return nil, err
	}
	if err := stream.SendMsg(request); err != nil {
		return nil, err
	}
	return stream, stream.CloseSend()
}

func (c client) duplex(ctx context.Context) (grpc.ClientStream, error) {
	about := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	return c.channel.NewStream(ctx, about, service+"FullDuplexCall")
}

// gather sends inputs of these sizes; the sum that the server found.
func (c client) gather(
	ctx context.Context, expect *BoolValue, sizes []int, options ...grpc.CallOption,
) (int, error) {
	stream, err := c.input(ctx, options...)
	if err != nil {
		return 0, err
	}
	for _, size := range sizes {
		request := &InputRequest{Payload: payload(size), ExpectCompressed: expect}
		if err := stream.SendMsg(request); err != nil && err != io.EOF {
			return 0, err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return 0, err
	}
	response := &InputResponse{}
	err = stream.RecvMsg(response)
	return int(response.AggregatedPayloadSize), err
}

// expectOutputs reads responses of these sizes and the end.
func expectOutputs(stream grpc.ClientStream, sizes ...int) error {
	for _, size := range sizes {
		response := &OutputResponse{}
		if err := stream.RecvMsg(response); err != nil {
			return err
		}
		if err := equalBody(response.Payload, size); err != nil {
			return err
		}
	}
	if err := stream.RecvMsg(&OutputResponse{}); err != io.EOF {
		return fmt.Errorf("the call does not end with OK: %v", err)
	}
	return nil
}
