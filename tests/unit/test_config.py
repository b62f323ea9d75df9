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


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_file(tmp_path: Path) -> None:
    file = written(
        tmp_path, "join_timeout_s = 5\nmax_group_failures = 5\nbucket_bytes = 5000\nexpiry_s = 5\n"
    )
    environment = {"R3CHANNEL_MAX_GROUP_FAILURES": "6", "R3CHANNEL_BUCKET_BYTES": "6000"}
    environment["R3CHANNEL_ENGINE"] = "1"  # the engine's: it may stand beside the channel's
    found = ChannelConfig.load(flags={"bucket_bytes": 7000}, file=file, environment=environment)
    own = found.join_timeout_s, found.max_group_failures, found.bucket_bytes, found.expiry_s
    assert own == (5.0, 6, 7000, 5.0)


def test_flags_reach_the_configuration_and_unset_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3CHANNEL_ON_MISSING", "live")
    found = ChannelConfig.from_args(
        parsed("--r3-token-tensors", "sampling_masks", "--r3-send-timeout-s", "3")
    )
    assert (found.token_tensors, found.send_timeout_s, found.on_missing) == ("sampling_masks", 3.0, "live")


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


@pytest.mark.parametrize(
    "values",
    [
        {"transport": "mpi"}, {"transport": "auto"}, {"fallback": "object_store"}, {"invalid_rows": "drop"},
        {"on_missing": "drop"}, {"on_lost": "drop"}, {"max_live": 1.1}, {"max_live": float("nan")},
        {"store_bytes": 1024}, {"max_group_failures": 0}, {"on_stale": "drop"}, {"bucket_bytes": 1},
        {"send_timeout_s": 0.0}, {"send_timeout_s": float("inf")}, {"send_timeout_s": float("nan")}, {"max_staleness": -2},
        {"metrics_port": 65536}, {"metrics_port": -2}, {"ingest_port": -1}, {"device": -1},
    ],
    ids=str,
)  # fmt: skip
def test_a_value_out_of_range_or_a_wrong_pair_is_refused_by_name(values: dict[str, Any]) -> None:
    name, value = next(iter(values.items()))
    with pytest.raises(ConfigError, match=rf"{name}\b.*{'' if value is True else value}"):
        ChannelConfig(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"delivery": "post"}, "R3CHANNEL_DELIVERY is 'post'"), ({"delivery": "direct"}, "needs R3CHANNEL_RELAY_URL"),
        ({"queue_bytes": 0}, "queue_bytes is 0"), ({"allow": "pp,nothing"}, "names .'nothing'."),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**values)
