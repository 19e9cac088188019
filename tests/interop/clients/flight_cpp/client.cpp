// A Flight client in C++: asks for a model's schema, then exchanges a stream of batches.
//
// Arguments: address, model, a file with an Arrow IPC stream, and the file for the results as
// another. Prints the schema as the bytes of an IPC message, in hexadecimal; on an error its text,
// and exits 1.
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include <arrow/api.h>
#include <arrow/flight/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>

namespace flight = arrow::flight;

namespace {

// Writes all batches while the results are read: neither side waits for the other's windows.
arrow::Status Write(arrow::ipc::RecordBatchStreamReader& batches,
                    flight::FlightStreamWriter& writer) {
  while (true) {
    ARROW_ASSIGN_OR_RAISE(auto batch, batches.Next());
    if (batch == nullptr) return writer.DoneWriting();
    ARROW_RETURN_NOT_OK(writer.WriteRecordBatch(*batch));
  }
}

arrow::Status Run(const std::string& address, const std::string& model, const std::string& source,
                  const std::string& target) {
  ARROW_ASSIGN_OR_RAISE(auto location, flight::Location::Parse("grpc://" + address));
  ARROW_ASSIGN_OR_RAISE(auto client, flight::FlightClient::Connect(location));
  flight::FlightCallOptions options;
  options.timeout = flight::TimeoutDuration{20.0};
  const auto descriptor = flight::FlightDescriptor::Path({model});

  ARROW_ASSIGN_OR_RAISE(auto info, client->GetFlightInfo(options, descriptor));
  arrow::ipc::DictionaryMemo memo;
  ARROW_ASSIGN_OR_RAISE(auto schema, info->GetSchema(&memo));

  ARROW_ASSIGN_OR_RAISE(auto input, arrow::io::ReadableFile::Open(source));
  ARROW_ASSIGN_OR_RAISE(auto batches, arrow::ipc::RecordBatchStreamReader::Open(input));
  ARROW_ASSIGN_OR_RAISE(auto exchange, client->DoExchange(options, descriptor));
  ARROW_RETURN_NOT_OK(exchange.writer->Begin(batches->schema()));
  arrow::Status written;
  std::thread thread([&] { written = Write(*batches, *exchange.writer); });
  auto results = exchange.reader->ToTable();
  thread.join();
  const auto closed = exchange.writer->Close();
  ARROW_RETURN_NOT_OK(results.status());
  ARROW_RETURN_NOT_OK(written);
  ARROW_RETURN_NOT_OK(closed);

  ARROW_ASSIGN_OR_RAISE(auto output, arrow::io::FileOutputStream::Open(target));
  ARROW_ASSIGN_OR_RAISE(auto file, arrow::ipc::MakeStreamWriter(output, (*results)->schema()));
  ARROW_RETURN_NOT_OK(file->WriteTable(**results));
  ARROW_RETURN_NOT_OK(file->Close());
  ARROW_RETURN_NOT_OK(output->Close());
  ARROW_ASSIGN_OR_RAISE(auto serialized, arrow::ipc::SerializeSchema(*schema));
  std::cout << serialized->ToHexString();
  return client->Close();
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return 2;
  const auto status = Run(words[1], words[2], words[3], words[4]);
  if (status.ok()) return 0;
  std::cout << status.ToString();
  return 1;
}
