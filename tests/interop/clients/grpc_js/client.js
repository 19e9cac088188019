// gRPC's interoperability test cases with grpc-js.
//
// Argument: the server's address. Reads the name of a case from each line, and answers `ok` or what
// is wrong.
'use strict';

const path = require('node:path');
const readline = require('node:readline');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const INITIAL = 'x-grpc-test-echo-initial';
const TRAILING = 'x-grpc-test-echo-trailing-bin';
const INITIAL_VALUE = 'test_initial_metadata_value';
const TRAILING_VALUE = Buffer.from([0xab, 0xab, 0xab]);
const MESSAGE = 'test status message';
const SPECIAL = '\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n';
const SENT = [27182, 8, 1828, 45904];
const RECEIVED = [31415, 9, 2653, 58979];
const LARGE_SENT = 271828;
const LARGE_RECEIVED = 314159;
const DEADLINE_MS = 10000;
const GZIP = 2; // Of channel option grpc.default_compression_algorithm.

const loaded = loader.loadSync(path.join(__dirname, 'interop.proto'), {
  keepCase: true,
  defaults: true,
});
const testing = grpc.loadPackageDefinition(loaded).grpc.testing;
const credentials = grpc.credentials.createInsecure();
const address = process.argv[2];
const plain = new testing.TestService(address, credentials);
const gzip = new testing.TestService(address, credentials, {
  'grpc.default_compression_algorithm': GZIP,
});
const unserved = new testing.UnimplementedService(address, credentials);

const payload = (size) => ({ body: Buffer.alloc(size) });
const input = (size, extra) => ({ payload: payload(size), ...extra });
const large = (extra) => ({
  response_size: LARGE_RECEIVED,
  payload: payload(LARGE_SENT),
  ...extra,
});
const streamed = (sent, sizes, extra) => ({
  response_parameters: sizes.map((size) => ({ size })),
  payload: payload(sent),
  ...extra,
});
const options = () => ({ deadline: Date.now() + DEADLINE_MS });

function equal(found, wanted, what) {
  if (found !== wanted) throw new Error(`${what}: ${found}, not ${wanted}`);
}

function equalBody(message, size) {
  const body = message.payload.body;
  equal(body.length, size, 'bytes of the payload');
  equal(body.equals(Buffer.alloc(size)), true, 'a payload of zeros');
}

// A call of one request and one response: what came, and how it ended.
function unary(client, method, request, metadata = new grpc.Metadata()) {
  return new Promise((resolve) => {
    const result = {};
    const call = client[method](request, metadata, options(), (error, response) => {
      result.error = error;
      result.response = response;
    });
    call.on('metadata', (initial) => (result.initial = initial));
    call.on('status', (status) => {
      result.status = status;
      setImmediate(() => resolve(result));
    });
  });
}

// A StreamingInputCall; `fill` writes the requests.
function gathered(client, fill) {
  return new Promise((resolve) => {
    const result = {};
    const call = client.StreamingInputCall(
      new grpc.Metadata(), options(), (error, response) => {
        result.error = error;
        result.response = response;
      });
    call.on('status', (status) => {
      result.status = status;
      setImmediate(() => resolve(result));
    });
    call.on('error', () => {});
    fill(call);
  });
}

// A call of many responses; `next` is called with each and the call.
function streaming(call, next = () => {}) {
  return new Promise((resolve, reject) => {
    const result = { responses: [] };
    call.on('metadata', (initial) => (result.initial = initial));
    call.on('error', () => {});
    call.on('data', (response) => {
      result.responses.push(response);
      try {
        next(result.responses.length, response);
      } catch (error) {
        reject(error);
      }
    });
    call.on('status', (status) => {
      result.status = status;
      setImmediate(() => resolve(result));
    });
  });
}

async function expectStatus(client, method, request, code, details) {
  const { status, error } = await unary(client, method, request);
  equal(error && error.code, code, 'the status');
  if (details !== undefined) equal(status.details, details, 'the message');
}

const cases = {
  async empty_unary() {
    const { error } = await unary(plain, 'EmptyCall', {});
    equal(error, null, 'the error');
  },

  async large_unary() {
    const { error, response } = await unary(plain, 'UnaryCall', large());
    equal(error, null, 'the error');
    equalBody(response, LARGE_RECEIVED);
  },

  async client_streaming() {
    const { error, response } = await gathered(plain, (call) => {
      for (const size of SENT) call.write(input(size));
      call.end();
    });
    equal(error, null, 'the error');
    equal(response.aggregated_payload_size, 74922, 'the sum of sizes');
  },

  async server_streaming() {
    const call = plain.StreamingOutputCall(streamed(0, RECEIVED), options());
    const { status, responses } = await streaming(call);
    equal(status.code, grpc.status.OK, 'the status');
    equal(responses.length, RECEIVED.length, 'responses');
    responses.forEach((response, at) => equalBody(response, RECEIVED[at]));
  },

  async ping_pong() {
    const call = plain.FullDuplexCall(options());
    const send = (at) => call.write(streamed(SENT[at], [RECEIVED[at]]));
    const over = streaming(call, (count, response) => {
      equalBody(response, RECEIVED[count - 1]);
      if (count < SENT.length) send(count);
      else call.end();
    });
    send(0);
    const { status, responses } = await over;
    equal(status.code, grpc.status.OK, 'the status');
    equal(responses.length, SENT.length, 'responses');
  },

  async empty_stream() {
    const call = plain.FullDuplexCall(options());
    const over = streaming(call);
    call.end();
    const { status, responses } = await over;
    equal(status.code, grpc.status.OK, 'the status');
    equal(responses.length, 0, 'responses');
  },

  async cancel_after_begin() {
    const { status } = await gathered(plain, (call) => call.cancel());
    equal(status.code, grpc.status.CANCELLED, 'the status');
  },

  async cancel_after_first_response() {
    const call = plain.FullDuplexCall(options());
    const over = streaming(call, () => call.cancel());
    call.write(streamed(SENT[0], [RECEIVED[0]]));
    const { status, responses } = await over;
    equal(status.code, grpc.status.CANCELLED, 'the status');
    equal(responses.length, 1, 'responses');
  },

  async timeout_on_sleeping_server() {
    const call = plain.FullDuplexCall({ deadline: Date.now() + 1 });
    const over = streaming(call);
    call.write(streamed(SENT[0], []));
    const { status } = await over;
    equal(status.code, grpc.status.DEADLINE_EXCEEDED, 'the status');
  },

  async custom_metadata() {
    const metadata = new grpc.Metadata();
    metadata.set(INITIAL, INITIAL_VALUE);
    metadata.set(TRAILING, TRAILING_VALUE);
    const single = await unary(plain, 'UnaryCall', large(), metadata);
    equal(single.error, null, 'the error');
    const call = plain.FullDuplexCall(metadata, options());
    const over = streaming(call);
    call.write(streamed(LARGE_SENT, [LARGE_RECEIVED]));
    call.end();
    const duplex = await over;
    equal(duplex.status.code, grpc.status.OK, 'the status');
    equalBody(single.response, LARGE_RECEIVED);
    equalBody(duplex.responses[0], LARGE_RECEIVED);
    for (const { initial, status } of [single, duplex]) {
      equal(initial.get(INITIAL)[0], INITIAL_VALUE, 'initial metadata');
      const trailing = status.metadata.get(TRAILING)[0];
      equal(trailing && TRAILING_VALUE.equals(trailing), true, 'trailing metadata');
    }
  },

  async status_code_and_message() {
    const wanted = { response_status: { code: 2, message: MESSAGE } };
    await expectStatus(plain, 'UnaryCall', wanted, grpc.status.UNKNOWN, MESSAGE);
    const call = plain.FullDuplexCall(options());
    const over = streaming(call);
    call.write(wanted);
    call.end();
    const { status } = await over;
    equal(status.code, grpc.status.UNKNOWN, 'the status');
    equal(status.details, MESSAGE, 'the message');
  },

  async special_status_message() {
    const wanted = { response_status: { code: 2, message: SPECIAL } };
    await expectStatus(plain, 'UnaryCall', wanted, grpc.status.UNKNOWN, SPECIAL);
  },

  async unimplemented_method() {
    await expectStatus(plain, 'UnimplementedCall', {}, grpc.status.UNIMPLEMENTED);
  },

  async unimplemented_service() {
    await expectStatus(unserved, 'UnimplementedCall', {}, grpc.status.UNIMPLEMENTED);
  },

  async client_compressed_unary() {
    const expecting = (value) => large({ expect_compressed: { value } });
    await expectStatus(plain, 'UnaryCall', expecting(true), grpc.status.INVALID_ARGUMENT);
    for (const value of [true, false]) {
      const client = value ? gzip : plain;
      const { error, response } = await unary(client, 'UnaryCall', expecting(value));
      equal(error, null, 'the error');
      equalBody(response, LARGE_RECEIVED);
    }
  },

  // A stream of each kind: the client cannot compress some messages of a stream only.
  async client_compressed_streaming() {
    const send = (value, sizes) => (call) => {
      for (const size of sizes) call.write(input(size, { expect_compressed: { value } }));
      call.end();
    };
    const probe = await gathered(plain, send(true, [27182]));
    equal(probe.status.code, grpc.status.INVALID_ARGUMENT, 'the status');
    for (const value of [true, false]) {
      const { error, response } = await gathered(
        value ? gzip : plain, send(value, [27182, 45904]));
      equal(error, null, 'the error');
      equal(response.aggregated_payload_size, 73086, 'the sum of sizes');
    }
  },

  async server_compressed_unary() {
    for (const value of [true, false]) {
      const { error, response } = await unary(
        plain, 'UnaryCall', large({ response_compressed: { value } }));
      equal(error, null, 'the error');
      equalBody(response, LARGE_RECEIVED);
    }
  },

  async server_compressed_streaming() {
    const sizes = [31415, 92653];
    const call = plain.StreamingOutputCall({
      response_parameters: sizes.map((size, at) => ({ size, compressed: { value: !at } })),
    }, options());
    const { status, responses } = await streaming(call);
    equal(status.code, grpc.status.OK, 'the status');
    equal(responses.length, sizes.length, 'responses');
    responses.forEach((response, at) => equalBody(response, sizes[at]));
  },
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    let said = 'ok';
    try {
      await cases[line]();
    } catch (error) {
      said = String(error).replaceAll('\n', ' ');
    }
    process.stdout.write(`${said}\n`);
  }
  process.exit(0);
}

main();
