from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from taskline.errors import InvalidSettings
from taskline.settings import Settings, as_environment, load_settings

ROOT = Path(__file__).parents[3]


def test_defaults_need_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_settings({}) == Settings()
    assert load_settings({"TASKLINE_TEST_KAFKA": "127.0.0.1:1", "HOME": "/"}) == Settings()


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (
            {"TASKLINE_KAFKA__BOOTSTRAP_SEVERS": "x"},
            "kafka.bootstrap_severs; did you mean 'bootstrap_servers'?",
        ),
        ({"TASKLINE_KAKFA__NAMESPACE": "x."}, "'kakfa'; did you mean 'kafka'?"),
        (
            {"TASKLINE_KAFKA_BOOTSTRAP_SERVERS": "x"},
            "TASKLINE_KAFKA_BOOTSTRAP_SERVERS names no setting; did you mean 'TASKLINE_KAFKA__BOOTSTRAP_SERVERS'?",
        ),
        ({"TASKLINE_WORKER__CONCURRENCY": "many"}, "worker.concurrency"),
        ({"TASKLINE_WORKER__CONCURRENCY": "0"}, "worker.concurrency"),
        ({"TASKLINE_KAFKA__NAMESPACE": "no-dot"}, "kafka.namespace"),
        ({"TASKLINE_TOPICS__QUEUES": "Default"}, "topics.queues"),
    ],
)
def test_what_is_refused_is_named(environ: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        load_settings(environ)
    assert says in str(refused.value)


def test_sources_in_order_of_strength(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[worker]\nconcurrency = 1\nwindow = 1\n[topics]\nqueues = ["default", "geo"]\n')
    settings = load_settings(
        {"TASKLINE_CONFIG": str(file), "TASKLINE_WORKER__WINDOW": "2", "TASKLINE_WORKER__PREFETCH": "2"},
        overrides={"worker": {"prefetch": 3, "concurrency": None}},
    )
    assert (settings.worker.concurrency, settings.worker.window, settings.worker.prefetch) == (1, 2, 3)
    assert settings.topics.queues == ("default", "geo")


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    with pytest.raises(InvalidSettings, match="can't read"):
        load_settings({}, config_file=file)
    file.write_text("[worker\n")
    with pytest.raises(InvalidSettings, match="not TOML"):
        load_settings({}, config_file=file)
    file.write_text("worker = 1\n")
    with pytest.raises(InvalidSettings, match=r"must stand in a \[section\]"):
        load_settings({}, config_file=file)


def test_secrets_are_masked() -> None:
    settings = load_settings(
        {"TASKLINE_KAFKA__SASL_PASSWORD": "hunter2", "TASKLINE_CASSANDRA__CONTACT_POINTS": "a, b"}
    )
    assert "hunter2" not in repr(settings)
    assert settings.cassandra.contact_points == ("a", "b")


def test_every_setting_is_described_and_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "scripts" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (ROOT / "docs" / "settings.md").read_text() == page.render(), "run `make docs`"
    for section in Settings.model_fields.values():
        for name, info in section.annotation.model_fields.items():
            assert info.description, name


def test_a_child_process_gets_the_same_settings() -> None:
    settings = Settings.model_validate(
        {
            "kafka": {"namespace": "x.", "sasl_password": "hunter2"},
            "topics": {"queues": ("default", "geo"), "retention_days": 2.5},
            "cassandra": {"contact_points": ("a", "b")},
            "worker": {"concurrency": 3},
        }
    )
    variables = as_environment(settings)
    assert variables["TASKLINE_WORKER__CONCURRENCY"] == "3"
    assert load_settings(variables) == settings
