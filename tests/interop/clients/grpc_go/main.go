// gRPC's interoperability test cases with grpc-go.
//
// Argument: the server's address. Reads the name of a case from each line, and answers `ok` or what
// is wrong. Written for release 1.33 of gRPC.
package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const (
	service       = "/grpc.testing.TestService/"
	initialKey    = "x-grpc-test-echo-initial"
	initialValue  = "test_initial_metadata_value"
	trailingKey   = "x-grpc-test-echo-trailing-bin"
	trailingValue = "\xab\xab\xab"
	statusMessage = "test status message"
	special       = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
	largeSent     = 271828
	largeReceived = 314159
	deadline      = 10 * time.Second
)

var (
	sent       = []int{27182, 8, 1828, 45904}
	received   = []int{31415, 9, 2653, 58979}
	compressed = grpc.UseCompressor(gzip.Name)
)

func payload(size int) *Payload { return &Payload{Body: make([]byte, size)} }

func large() *SimpleRequest {
	return &SimpleRequest{ResponseSize: largeReceived, Payload: payload(largeSent)}
}

func streamed(sent int, sizes ...int) *OutputRequest {
	request := &OutputRequest{Payload: payload(sent)}
	for _, size := range sizes {
		request.ResponseParameters = append(request.ResponseParameters, &Parameters{Size: int32(size)})
	}
	return request
}

func equalBody(found *Payload, size int) error {
	if found == nil || !bytes.Equal(found.Body, make([]byte, size)) {
		return fmt.Errorf("the response is not %d zeros", size)
	}
	return nil
}

func expectCode(err error, code codes.Code) error {
	if found := status.Code(err); found != code {
		return fmt.Errorf("the status is %v, not %v: %v", found, code, err)
	}
	return nil
}

func expectStatus(err error, code codes.Code, text string) error {
	if wrong := expectCode(err, code); wrong != nil {
		return wrong
	}
	if found := status.Convert(err).Message(); found != text {
		return fmt.Errorf("the message is %q, not %q", found, text)
	}
	return nil
}

func emptyUnary(ctx context.Context, c client) error {
	return c.unary(ctx, service+"EmptyCall", &Empty{}, &Empty{})
}

func largeUnary(ctx context.Context, c client) error { return c.largeUnary(ctx, large()) }

func clientStreaming(ctx context.Context, c client) error {
	sum, err := c.gather(ctx, nil, sent)
	if err == nil && sum != 74922 {
		err = fmt.Errorf("the sum of sizes is %d", sum)
	}
	return err
}

func serverStreaming(ctx context.Context, c client) error {
	stream, err := c.output(ctx, streamed(0, received...))
	if err != nil {
		return err
	}
	return expectOutputs(stream, received...)
}

func pingPong(ctx context.Context, c client) error {
	stream, err := c.duplex(ctx)
	if err != nil {
		return err
	}
	for at, size := range sent {
		if err := stream.SendMsg(streamed(size, received[at])); err != nil {
			return err
		}
		response := &OutputResponse{}
		if err := stream.RecvMsg(response); err != nil {
			return err
		}
		if err := equalBody(response.Payload, received[at]); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return expectOutputs(stream)
}

func emptyStream(ctx context.Context, c client) error {
	stream, err := c.duplex(ctx)
	if err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return expectOutputs(stream)
}

func cancelAfterBegin(ctx context.Context, c client) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.input(ctx)
	cancel()
	if err != nil {
		return err
	}
	return expectCode(stream.RecvMsg(&InputResponse{}), codes.Canceled)
}

func cancelAfterFirstResponse(ctx context.Context, c client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.duplex(ctx)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(streamed(sent[0], received[0])); err != nil {
		return err
	}
	response := &OutputResponse{}
	if err := stream.RecvMsg(response); err != nil {
		return err
	}
	cancel()
	if err := equalBody(response.Payload, received[0]); err != nil {
		return err
	}
	return expectCode(stream.RecvMsg(response), codes.Canceled)
}

func timeoutOnSleepingServer(ctx context.Context, c client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	stream, err := c.duplex(ctx)
	if err == nil {
		err = stream.SendMsg(streamed(sent[0]))
		if err == nil || err == io.EOF {
			err = stream.RecvMsg(&OutputResponse{})
		}
	}
	return expectCode(err, codes.DeadlineExceeded)
}

func customMetadata(ctx context.Context, c client) error {
	ctx = metadata.AppendToOutgoingContext(ctx, initialKey, initialValue, trailingKey, trailingValue)
	var initial, trailing metadata.MD
	err := c.largeUnary(ctx, large(), grpc.Header(&initial), grpc.Trailer(&trailing))
	if err != nil {
		return err
	}
	if err := expectEcho(initial, trailing); err != nil {
		return err
	}
	stream, err := c.duplex(ctx)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(streamed(largeSent, largeReceived)); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if initial, err = stream.Header(); err != nil {
		return err
	}
	if err := expectOutputs(stream, largeReceived); err != nil {
		return err
	}
	return expectEcho(initial, stream.Trailer())
}

func expectEcho(initial, trailing metadata.MD) error {
	if got := initial.Get(initialKey); len(got) != 1 || got[0] != initialValue {
		return fmt.Errorf("initial metadata is %v", initial)
	}
	if got := trailing.Get(trailingKey); len(got) != 1 || got[0] != trailingValue {
		return fmt.Errorf("trailing metadata is %v", trailing)
	}
	return nil
}

func unaryStatus(ctx context.Context, c client, text string) error {
	request := &SimpleRequest{ResponseStatus: &EchoStatus{Code: 2, Message: text}}
	err := c.unary(ctx, service+"UnaryCall", request, &SimpleResponse{})
	return expectStatus(err, codes.Unknown, text)
}

func statusCodeAndMessage(ctx context.Context, c client) error {
	if err := unaryStatus(ctx, c, statusMessage); err != nil {
		return err
	}
	stream, err := c.duplex(ctx)
	if err != nil {
		return err
	}
	request := &OutputRequest{ResponseStatus: &EchoStatus{Code: 2, Message: statusMessage}}
	if err := stream.SendMsg(request); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return expectStatus(stream.RecvMsg(&OutputResponse{}), codes.Unknown, statusMessage)
}

func specialStatusMessage(ctx context.Context, c client) error { return unaryStatus(ctx, c, special) }

func unimplementedMethod(ctx context.Context, c client) error {
	err := c.unary(ctx, service+"UnimplementedCall", &Empty{}, &Empty{})
	return expectCode(err, codes.Unimplemented)
}

func unimplementedService(ctx context.Context, c client) error {
	method := "/grpc.testing.UnimplementedService/UnimplementedCall"
	return expectCode(c.unary(ctx, method, &Empty{}, &Empty{}), codes.Unimplemented)
}

func clientCompressedUnary(ctx context.Context, c client) error {
	request := large()
	request.ExpectCompressed = &BoolValue{Value: true}
	if err := expectCode(c.largeUnary(ctx, request), codes.InvalidArgument); err != nil {
		return err
	}
	if err := c.largeUnary(ctx, request, compressed); err != nil {
		return err
	}
	request.ExpectCompressed = &BoolValue{}
	return c.largeUnary(ctx, request)
}

// A stream of each kind: the client cannot compress some messages of a stream only.
func clientCompressedStreaming(ctx context.Context, c client) error {
	yes, no := &BoolValue{Value: true}, &BoolValue{}
	_, err := c.gather(ctx, yes, []int{27182})
	if err := expectCode(err, codes.InvalidArgument); err != nil {
		return err
	}
	sizes := []int{27182, 45904}
	sum, err := c.gather(ctx, yes, sizes, compressed)
	if err != nil || sum != 73086 {
		return fmt.Errorf("compressed: the sum of sizes is %d: %v", sum, err)
	}
	if sum, err = c.gather(ctx, no, sizes); err != nil || sum != 73086 {
		return fmt.Errorf("not compressed: the sum of sizes is %d: %v", sum, err)
	}
	return nil
}

func serverCompressedUnary(ctx context.Context, c client) error {
	for _, wanted := range []bool{true, false} {
		request := large()
		request.ResponseCompressed = &BoolValue{Value: wanted}
		if err := c.largeUnary(ctx, request); err != nil {
			return err
		}
	}
	return nil
}

func serverCompressedStreaming(ctx context.Context, c client) error {
	request := streamed(0, 31415, 92653)
	for at, parameters := range request.ResponseParameters {
		parameters.Compressed = &BoolValue{Value: at == 0}
	}
	stream, err := c.output(ctx, request)
	if err != nil {
		return err
	}
	return expectOutputs(stream, 31415, 92653)
}

var cases = map[string]func(context.Context, client) error{
	"empty_unary":                 emptyUnary,
	"large_unary":                 largeUnary,
	"client_streaming":            clientStreaming,
	"server_streaming":            serverStreaming,
	"ping_pong":                   pingPong,
	"empty_stream":                emptyStream,
	"cancel_after_begin":          cancelAfterBegin,
	"cancel_after_first_response": cancelAfterFirstResponse,
	"timeout_on_sleeping_server":  timeoutOnSleepingServer,
	"custom_metadata":             customMetadata,
	"status_code_and_message":     statusCodeAndMessage,
	"special_status_message":      specialStatusMessage,
	"unimplemented_method":        unimplementedMethod,
	"unimplemented_service":       unimplementedService,
	"client_compressed_unary":     clientCompressedUnary,
	"client_compressed_streaming": clientCompressedStreaming,
	"server_compressed_unary":     serverCompressedUnary,
	"server_compressed_streaming": serverCompressedStreaming,
}

func main() {
	channel, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		panic(err)
	}
	defer channel.Close()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		said := "ok"
		run, isKnown := cases[lines.Text()]
		if !isKnown {
			said = "there is no such case"
		} else {
			ctx, cancel := context.WithTimeout(context.Background(), deadline)
			if err := run(ctx, client{channel}); err != nil {
				said = strings.ReplaceAll(err.Error(), "\n", " ")
			}
			cancel()
		}
		fmt.Println(said)
	}
}
