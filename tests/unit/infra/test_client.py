from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from taskline.errors import InvalidSettings, TasklineError, Unavailable
from taskline.infra.kafka.client import client_config, new_client, reason_of, translated
from taskline.infra.kafka.delivery import producer_config
from taskline.settings import KafkaSettings, ProducerSettings


def test_what_is_not_set_is_left_to_the_client() -> None:
    config = client_config(KafkaSettings(), client_id="me")
    assert config["client.id"] == "me"
    assert not any(name.startswith(("sasl.", "ssl.")) for name in config)


def test_security_settings_reach_the_client_and_no_message() -> None:
    kafka = KafkaSettings(
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="u",
        sasl_password="hush",
        ssl_ca_location="/nowhere/ca.pem",
    )
    config = client_config(kafka, client_id="me")
    assert config["sasl.password"] == "hush"
    assert config["sasl.mechanism"] == "SCRAM-SHA-512"
    with pytest.raises(InvalidSettings, match="Kafka client") as caught:
        new_client(Producer, config)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("max_record_bytes", [16_384, 1_048_576, 8_000_000])
def test_a_producers_limits_follow_the_topics(max_record_bytes: int) -> None:
    config = producer_config(ProducerSettings(), max_record_bytes)
    # A batch is refused as a whole, so it must fit whatever a single record must fit.
    assert config["batch.size"] < max_record_bytes
    assert config["message.max.bytes"] == 2 * max_record_bytes
    assert config["queue.buffering.max.kbytes"] * 1024 > config["message.max.bytes"]
    new_client(Producer, {"bootstrap.servers": "127.0.0.1:1"} | config)


def test_durability_is_not_a_setting() -> None:
    config = producer_config(ProducerSettings(), 1_048_576)
    assert config["enable.idempotence"] is True
    assert config["acks"] == "all"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KafkaException(KafkaError(KafkaError._TRANSPORT)), Unavailable),
        (KafkaException(KafkaError(KafkaError._ALL_BROKERS_DOWN)), Unavailable),
        (KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED)), Unavailable),
        (KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH)), Unavailable),
        (KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)), Unavailable),
        (TimeoutError(), Unavailable),
        (KafkaException(KafkaError(KafkaError.INVALID_REPLICATION_FACTOR)), TasklineError),
    ],
)
def test_errors_are_told_apart(error: Exception, kind: type[TasklineError]) -> None:
    told = translated(error, "listing topics")
    assert type(told) is kind
    assert "listing topics" in str(told)


def test_reasons_name_the_code() -> None:
    assert "_TRANSPORT" in reason_of(KafkaError(KafkaError._TRANSPORT))
    assert reason_of(ValueError("plain")) == "plain"
