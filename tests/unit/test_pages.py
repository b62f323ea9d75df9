"""Generated tables are the committed ones; options and errors are complete, and each name means one thing."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest

from r3channel.config import ChannelConfig, EngineConfig
from r3channel.tools.pages import TABLES, every_error, happened, options, put_into


@pytest.mark.parametrize("name", TABLES)
def test_the_committed_table_is_the_generated_one(name: str) -> None:
    text = TABLES[name].page.read_text()
    assert text == put_into(text, name), "run: python -m r3channel.tools.pages"


def test_every_error_says_what_to_do_and_has_a_reason_of_its_own() -> None:
    found = every_error()
    assert len(found) <= 46  # one class per remedy
    assert [
        error for error in found if not {"reason", "remedy"} <= set(vars(error)) or not happened(error)
    ] == []
    assert [word for word, times in Counter(error.reason for error in found).items() if times > 1] == []


def test_an_option_that_relay_and_engines_share_means_the_same_to_both() -> None:
    shared = {f.name for f in fields(ChannelConfig)} & {f.name for f in fields(EngineConfig)}
    page = {"interface", "metrics_dir", "metrics_port", "run_name"}
    assert shared == {"token_file", "sampling_masks"} | page


def test_every_option_is_in_the_table_once_and_is_explained() -> None:
    found = list(options())
    variables = [option.variable for option in found if option.variable]
    assert len(set(variables)) == len(variables) == len(fields(ChannelConfig)) + len(fields(EngineConfig)) - 6
    assert [option for option in found if not option.meaning] == []
