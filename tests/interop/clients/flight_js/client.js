// A Flight client in JavaScript: asks for a model's schema, then exchanges a stream of batches.
//
// apache-arrow has no Flight, so Flight is spoken by grpc-js. apache-arrow reads the batches and
// the results, and writes the results anew.
//
// Arguments: address, model, a file with an Arrow IPC stream, and the file for the results as
// another. Prints the schema as the bytes of an IPC message, in hexadecimal; on an error its text,
// and exits 1.
'use strict';

const fs = require('node:fs');
const path = require('node:path');
const arrow = require('apache-arrow');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const MESSAGE_BYTES = 64 << 20;
const DEADLINE_MS = 20000;
const CONTINUATION = 0xffffffff;

const loaded = loader.loadSync(path.join(__dirname, 'flight.proto'), { keepCase: true });
const { FlightService } = grpc.loadPackageDefinition(loaded).arrow.flight.protocol;

// The messages of an IPC stream, as FlightData.
function split(raw) {
  const messages = [];
  for (let at = 0; raw.readUInt32LE(at) === CONTINUATION; ) {
    const size = raw.readUInt32LE(at + 4);
    if (!size) break;
    const data_header = raw.subarray(at + 8, at + 8 + size);
    at += 8 + size;
    const bodyBytes = Number(arrow.Message.decode(data_header).bodyLength);
    messages.push({ data_header, data_body: raw.subarray(at, at + bodyBytes) });
    at += bodyBytes;
  }
  return messages;
}

// An IPC stream of FlightData; headers are padded to 8 bytes.
function join(messages) {
  const parts = [];
  for (const { data_header: header, data_body: body } of messages) {
    const padding = -header.length & 7;
    const prefix = Buffer.alloc(8);
    prefix.writeUInt32LE(CONTINUATION, 0);
    prefix.writeUInt32LE(header.length + padding, 4);
    parts.push(prefix, header, Buffer.alloc(padding), body ?? Buffer.alloc(0));
  }
  return Buffer.concat(parts);
}

function flightInfo(client, descriptor, options) {
  return new Promise((resolve, reject) => {
    client.GetFlightInfo(descriptor, options, (error, info) => {
      if (error) reject(error);
      else resolve(info);
    });
  });
}

function exchange(client, descriptor, messages, options) {
  return new Promise((resolve, reject) => {
    const call = client.DoExchange(options);
    const received = [];
    call.on('data', (message) => received.push(message));
    call.on('error', reject);
    call.on('end', () => resolve(received));
    messages.forEach((message, at) => {
      call.write(at ? message : { flight_descriptor: descriptor, ...message });
    });
    call.end();
  });
}

async function main(address, model, source, target) {
  const client = new FlightService(address, grpc.credentials.createInsecure(), {
    'grpc.max_receive_message_length': MESSAGE_BYTES,
    'grpc.max_send_message_length': MESSAGE_BYTES,
  });
  const descriptor = { type: 1, path: [model] };
  const options = { deadline: Date.now() + DEADLINE_MS };
  const info = await flightInfo(client, descriptor, options);
  const messages = split(fs.readFileSync(source));
  const results = arrow.tableFromIPC(join(await exchange(client, descriptor, messages, options)));
  fs.writeFileSync(target, arrow.tableToIPC(results, 'stream'));
  process.stdout.write(info.schema.toString('hex'));
  client.close();
}

main(...process.argv.slice(2)).catch((error) => {
  process.stdout.write(String(error));
  process.exitCode = 1;
});
