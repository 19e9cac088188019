"""Messages as JSON: fields under their own names, numbers as numbers."""

from __future__ import annotations

from iskander._generated import oip_pb2
from iskander.protocols.oip.http.messages import plain


def test_a_field_is_there_also_where_it_was_not_set() -> None:
    assert plain(oip_pb2.ModelMetadataResponse(name="m", versions=["1"])) == {
        "name": "m",
        "versions": ["1"],
        "platform": "",
        "inputs": [],
        "outputs": [],
    }


def test_numbers_are_numbers_enums_names_and_messages_objects() -> None:
    told = plain(
        oip_pb2.ModelConfig(
            max_batch_size=8,
            input=[oip_pb2.ModelInput(name="x", data_type="TYPE_INT64", dims=[2**40])],
            model_transaction_policy=oip_pb2.ModelTransactionPolicy(decoupled=False),
        )
    )

    assert told["max_batch_size"] == 8
    assert told["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [2**40]}]
    assert told["model_transaction_policy"] == {"decoupled": False}
    assert "dynamic_batching" not in told


def test_a_map_is_an_object() -> None:
    kind = oip_pb2.SystemSharedMemoryStatusResponse
    told = plain(kind(regions={"a": kind.RegionStatus(name="a", byte_size=2**33)}))

    assert told["regions"]["a"]["byte_size"] == 2**33
