"""Protobuf messages as JSON: original field names, and numbers instead of text."""

from __future__ import annotations

from iskander._generated import oip_pb2
from iskander.gateway.protocols.oip.http.messages import plain


def test_unset_fields_are_included() -> None:
    assert plain(oip_pb2.ModelMetadataResponse(name="m", versions=["1"])) == {
        "name": "m",
        "versions": ["1"],
        "platform": "",
        "inputs": [],
        "outputs": [],
    }


def test_numbers_enums_and_messages_are_converted() -> None:
    converted = plain(
        oip_pb2.ModelConfig(
            max_batch_size=8,
            input=[oip_pb2.ModelInput(name="x", data_type="TYPE_INT64", dims=[2**40])],
            model_transaction_policy=oip_pb2.ModelTransactionPolicy(decoupled=False),
        )
    )

    assert converted["max_batch_size"] == 8
    assert converted["input"] == [{"name": "x", "data_type": "TYPE_INT64", "dims": [2**40]}]
    assert converted["model_transaction_policy"] == {"decoupled": False}
    assert "dynamic_batching" not in converted


def test_map_is_converted_to_an_object() -> None:
    kind = oip_pb2.SystemSharedMemoryStatusResponse
    converted = plain(kind(regions={"a": kind.RegionStatus(name="a", byte_size=2**33)}))

    assert converted["regions"]["a"]["byte_size"] == 2**33
