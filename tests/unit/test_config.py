"""Where a value of the channel comes from, and what is refused with its name before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from r3channel.config import ChannelConfig, EngineConfig, add_arguments, field_texts
from r3channel.errors import ConfigError


def parsed(*argv: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser()).parse_args(argv)


def written(folder: Path, text: str) -> Path:
    file = folder / "channel.toml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path, "join_timeout_s = 5\nmax_group_failures = 5\nbucket_bytes = 5000\nexpiry_s = 5\n"
    )
    for name, value in (("MAX_GROUP_FAILURES", "6"), ("BUCKET_BYTES", "6000"), ("ON_MISSING", "live")):
        monkeypatch.setenv(f"R3CHANNEL_{name}", value)
    monkeypatch.setenv("R3CHANNEL_ENGINE", "1")  # the engine's: it may stand beside the channel's
    flags = "--r3-bucket-bytes", "7000", "--r3-token-tensors", "sampling_masks"
    found = ChannelConfig.from_args(parsed("--r3-config", str(file), *flags))
    own = found.join_timeout_s, found.max_group_failures, found.bucket_bytes, found.expiry_s
    assert own == (5.0, 6, 7000, 5.0)
    assert (found.token_tensors, found.on_missing) == ("sampling_masks", "live")


def test_rows_that_never_came_are_live_where_the_channel_says_so_and_nobody_asked_for_a_mask() -> None:
    def policy(**values: str) -> str:
        return ChannelConfig(**values).policy  # type: ignore[arg-type]

    for name in ("on_missing", "on_lost", "on_changed"):
        assert (policy(), policy(**{name: "live"})) == ("error", "live")
    assert [policy(on_missing="live", invalid_rows=rows) for rows in ("live", "mask")] == ["live", "mask"]


def test_every_option_has_a_flag_with_a_text() -> None:
    said = " ".join(add_arguments(argparse.ArgumentParser()).format_help().split())
    for field in fields(ChannelConfig):
        _, _, text = said.partition(f"--r3-{field.name.replace('_', '-')} ")
        meaning = field_texts(ChannelConfig)[field.name]
        assert len(meaning.split()) > 3 and f"{meaning} Default {field.default!r}." in text, field.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bucket_bytes = =", "expected a readable TOML file"), ("nothing = 1", "unknown name 'nothing'"),
        ("bucket_bytes = [1]", "bucket_bytes=[1], expected a whole number"),
        ("bucket_bytes = 4096.7", "bucket_bytes=4096.7, expected a whole number"),
        ("bucket_bytes = true", "bucket_bytes=True, expected a whole number"),
        ("journal = 7", "journal=7, expected text"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_named_with_the_value(tmp_path: Path, text: str, said: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        ChannelConfig.load(file=file, environment={})
    assert str(file) in str(raised.value) and said in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("QUEUE_BYTES", "lots", "a whole number"), *(("ENGINE", word, "0 or 1") for word in ("yes", "on", "2"))],
)
def test_a_variable_of_another_kind_is_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"R3CHANNEL_{name}='{value}', expected {expected}"):
        EngineConfig.from_environment({f"R3CHANNEL_{name}": value})


def test_a_mistyped_variable_is_named_by_both_sides_and_no_other() -> None:
    said = "R3CHANNEL_NOBODY is no variable of r3channel. R3CHANNEL_STORE_BYTS .* did you mean R3CHANNEL_STORE_BYTES?"
    for read in (ChannelConfig.load, EngineConfig.from_environment):
        assert read(environment={"R3CHANNEL_ENGINE": "1", "R3CHANNEL_BUCKET_BYTES": "9999", "R3OTHER": "1"})
        with pytest.raises(ConfigError, match=said):
            read(environment={"R3CHANNEL_STORE_BYTS": "1", "R3CHANNEL_NOBODY": "1"})


def test_a_switch_is_set_by_1_and_true_and_left_by_0_false_and_nothing() -> None:
    words = ("1", "True", "0", "false", "")
    found = [EngineConfig.from_environment({"R3CHANNEL_ENGINE": word}).engine for word in words]
    assert found == [True, True, False, False, False]


VALUES: list[tuple[type, dict[str, Any], str]] = [
    *((ChannelConfig, {"transport": value}, value) for value in ("mpi", "auto")),
    *((ChannelConfig, {name: "drop"}, "drop") for name in ("invalid_rows", "on_missing", "on_lost", "on_stale")),
    *((ChannelConfig, {"send_timeout_s": value}, f"{value}") for value in (0.0, float("inf"), float("nan"))),
    *((ChannelConfig, {"metrics_port": value}, f"{value}") for value in (65536, -2)),
    (ChannelConfig, {"fallback": "object_store"}, "object_store"), (ChannelConfig, {"max_live": 1.1}, "1.1"),
    (ChannelConfig, {"max_live": float("nan")}, "nan"), (ChannelConfig, {"store_bytes": 1024}, "1024"),
    (ChannelConfig, {"max_group_failures": 0}, "0"), (ChannelConfig, {"bucket_bytes": 1}, "1"),
    (ChannelConfig, {"max_staleness": -2}, "-2"), (ChannelConfig, {"ingest_port": -1}, "-1"),
    (ChannelConfig, {"device": -1}, "-1"), (ChannelConfig, {"unclaimed_timeout_s": -1.0}, "-1"),
    (EngineConfig, {"delivery": "post"}, "is 'post'"), (EngineConfig, {"delivery": "direct"}, "needs R3CHANNEL_RELAY_URL"),
    (EngineConfig, {"queue_bytes": 0}, "is 0"), (EngineConfig, {"allow": "pp,nothing"}, "names .'nothing'."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "said"), VALUES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_value_out_of_range_or_a_wrong_pair_is_refused_by_name(
    kind: type, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?i){next(iter(values))}\b.*{said}"):
        kind(**values)
