"""What the roles stand on: topics, Kafka clients, telemetry, and the local stack."""
