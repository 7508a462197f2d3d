"""What the subcommands print, as a terminal, a pipe and a notebook get it."""

from __future__ import annotations

from minikv.show import console


def test_a_table_in_a_pipe_is_plain_even_where_colours_are_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel sets it
    table = console.table("GPU", "memory")
    table.add_row("l4", "24 GB")
    console.show(table)
    assert "24 GB" in (out := capsys.readouterr().out)
    assert "\x1b" not in out


def test_one_thing_is_counted_in_the_singular():
    assert [console.counted(count, "token") for count in (0, 1, 2_000)] == ["0 tokens", "1 token", "2,000 tokens"]
