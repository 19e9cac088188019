// A Flight reader in C++ with the calls of a database's Flight table: GetSchema, GetFlightInfo, and
// DoGet for each endpoint, at its first location if it has any.
//
// Arguments: address, source, and the file for the rows as an Arrow IPC stream. Prints the number of
// endpoints; on an error its text, and exits 1.
#include <iostream>
#include <memory>
#include <string>

#include <arrow/api.h>
#include <arrow/flight/api.h>
#include <arrow/io/api.h>
#include <arrow/ipc/api.h>

namespace flight = arrow::flight;

namespace {

flight::FlightCallOptions Options() {
  flight::FlightCallOptions options;
  options.timeout = flight::TimeoutDuration{30.0};
  return options;
}

arrow::Status Copy(flight::FlightClient& client, const flight::Ticket& ticket,
                   arrow::ipc::RecordBatchWriter& target) {
  ARROW_ASSIGN_OR_RAISE(auto stream, client.DoGet(Options(), ticket));
  ARROW_ASSIGN_OR_RAISE(auto table, stream->ToTable());
  return target.WriteTable(*table);
}

arrow::Status Run(const std::string& address, const std::string& source,
                  const std::string& target) {
  ARROW_ASSIGN_OR_RAISE(auto location, flight::Location::Parse("grpc://" + address));
  ARROW_ASSIGN_OR_RAISE(auto client, flight::FlightClient::Connect(location));
  const auto descriptor = flight::FlightDescriptor::Path({source});
  ARROW_ASSIGN_OR_RAISE(auto result, client->GetSchema(Options(), descriptor));
  arrow::ipc::DictionaryMemo memo;
  ARROW_ASSIGN_OR_RAISE(auto schema, result->GetSchema(&memo));
  ARROW_ASSIGN_OR_RAISE(auto info, client->GetFlightInfo(Options(), descriptor));

  ARROW_ASSIGN_OR_RAISE(auto output, arrow::io::FileOutputStream::Open(target));
  ARROW_ASSIGN_OR_RAISE(auto file, arrow::ipc::MakeStreamWriter(output, schema));
  for (const auto& endpoint : info->endpoints()) {
    if (endpoint.locations.empty()) {
      ARROW_RETURN_NOT_OK(Copy(*client, endpoint.ticket, *file));
    } else {
      ARROW_ASSIGN_OR_RAISE(auto other, flight::FlightClient::Connect(endpoint.locations[0]));
      ARROW_RETURN_NOT_OK(Copy(*other, endpoint.ticket, *file));
      ARROW_RETURN_NOT_OK(other->Close());
    }
  }
  ARROW_RETURN_NOT_OK(file->Close());
  ARROW_RETURN_NOT_OK(output->Close());
  std::cout << info->endpoints().size();
  return client->Close();
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 2;
  const auto status = Run(words[1], words[2], words[3]);
  if (status.ok()) return 0;
  std::cerr << status.ToString() << std::endl;
  return 1;
}
