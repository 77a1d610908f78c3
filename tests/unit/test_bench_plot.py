"""bench.plot: from results and traces to pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from bench.bootstrap import Ratio
from bench.plot import __main__ as command
from bench.plot import canvas, lengths, links, timeline
from bench.plot.series import ResultError, Series, Where, in_order, of_forward, of_serve, places
from bench.push.cells import Cell
from tests.unit.test_bench_push import cell as push_cell
from tests.unit.test_demo_figures import push_line

PNG = b"\x89PNG"
HEAD = {"machine": {"cpus": 2}, "date": "2026-11-21T09:00:00+00:00"}


def serve_cell(**changes: Any) -> dict[str, Any]:
    figures = {"p50": 2.0, "raw": [[1.0, 2.0], [3.0, 4.0]]}
    nothing = {"ttft_ms": figures, "exposed_ms": None}
    cell = {
        "link": "2gbit",
        "max_num_batched_tokens": None,
        "prompt_tokens": 1024,
        "concurrency": 4,
        "request_rate": None,
        "modes": {"aggregated": nothing, "layer": nothing | {"exposed_ms": figures}, "pull": {"ttft_ms": None}},
        "ratios": {"ttft_ms": {"layer/aggregated": {"ratio": 1.1, "low": 1.0, "high": 1.2}}},
    }
    return cell | changes


def exposed_cell(link: str, tokens: int, **modes: Sequence[float]) -> dict[str, Any]:
    """Exposed times of each mode, none if not known; first tokens take 100, 101 and 102 ms."""
    figures = {
        mode: {"ttft_ms": {"raw": [[100.0, 101.0, 102.0]]}, "exposed_ms": {"raw": [list(exposed)]} if exposed else None}
        for mode, exposed in modes.items()
    }
    ratios = {f"{mode}/request": {"ratio": 0.9, "low": 0.8, "high": 1.0} for mode in modes if mode != "request"}
    return serve_cell(prompt_tokens=tokens, link=link, concurrency=1, modes=figures, ratios={"ttft_ms": ratios})


def serve_result(link: str = "loopback") -> dict[str, Any]:
    cells = [
        exposed_cell(link, 1024, layer=[4.0, 5.0], request=[90.0, 95.0, 99.0], other=[]),
        exposed_cell(link, 64, layer=[4.0, 4.5, 5.0], request=[9.0, 9.5, 9.9], other=[]),
    ]
    return HEAD | {"cells": cells}


def written(path: Path, result: dict[str, Any]) -> Path:
    path.write_text(json.dumps(result))
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(command.app, [str(each) for each in arguments])
    return done.exit_code, done.output


def test_series_are_of_one_mode_at_one_length_without_lost_traces() -> None:
    series = of_serve(serve_result("500mbit"))
    assert len(series) == 6
    ratios = {"request": Ratio(0.9, 0.8, 1.0)}
    assert series[0] == Series(
        Where("500mbit", "1 at a time"), "layer", 1024, (100.0, 101.0, 102.0), (4.0, 5.0), ratios
    )
    assert series[2].exposed_ms == ()
    modes = in_order(series)
    assert list(modes) == ["layer", "request", "other"]
    assert [one.tokens for one in modes["layer"]] == [64, 1024]


@pytest.mark.parametrize(
    ("link", "gbit"), [("2gbit", 2.0), ("500mbit", 0.5), ("0.5Gbit", 0.5), ("loopback", None), ("eth0", None)]
)
def test_the_speed_of_a_link(link: str, gbit: float | None) -> None:
    assert Where(link).gbit == gbit


def test_conditions_come_with_the_slowest_link_first() -> None:
    wheres = [Where("loopback"), Where("10gbit"), Where("500mbit", "8 at a time")]
    series = [Series(where, "layer", 1, (1.0,)) for where in wheres]
    assert [str(where) for where in places(series)] == ["500mbit, 8 at a time", "10gbit", "loopback"]


def test_modes_have_the_same_colours_everywhere_and_others_their_own() -> None:
    first, second = canvas.colours(["layer", "x", "y"]), canvas.colours(["request", "layer"])
    assert first["layer"] == second["layer"]
    assert len(set(first.values())) == 3


def panels(draw: Any, *arguments: Any) -> list[Any]:
    """The panels that were drawn, row by row."""
    kept: list[Any] = []
    with mock.patch("matplotlib.pyplot.close", kept.append):
        draw(*arguments)
    return list(kept[0].axes)


def curves(panel: Any) -> dict[str, list[float]]:
    return {line.get_label(): [float(y) for y in line.get_ydata()] for line in panel.get_lines()}


def test_lengths_show_medians_ratios_and_what_is_exposed(tmp_path: Path) -> None:
    first, ratios, exposed = panels(lengths.draw, of_serve(serve_result()), tmp_path / "a.png", "title")
    assert curves(first) == {mode: [101.0, 101.0] for mode in ("layer", "request", "other")}
    assert curves(exposed) == {"layer": [4.5, 4.5], "request": [9.5, 95.0]}
    assert "request's" in ratios.get_title("left")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_without_traces_there_is_no_exposed_time(tmp_path: Path) -> None:
    series = [Series(Where(), mode, 64, (1.0, 2.0)) for mode in ("pull", "aggregated")]
    assert len(panels(lengths.draw, series, tmp_path / "a.png", "title")) == 2


def test_ratios_are_the_benchs_own(tmp_path: Path) -> None:
    """To the mode that most are compared with."""
    both = {"request": Ratio(0.9, 0.8, 1.0), "aggregated": Ratio(1.1, 1.0, 1.3)}
    one = {"aggregated": Ratio(1.2, 1.1, 1.3)}
    series = [
        Series(Where(), mode, 64, (1.0,), (), ratios)
        for mode, ratios in (("aggregated", {}), ("request", one), ("layer", both))
    ]
    _, ratios = panels(lengths.draw, series, tmp_path / "a.png", "title")
    assert "aggregated's" in ratios.get_title("left")
    drawn = [float(line.get_ydata()[0]) for line in ratios.get_lines()]
    assert drawn == [1.0, 1.2, 1.1]
    bars = [segment for each in ratios.collections for segment in each.get_segments()]
    assert sorted(tuple(bar[:, 1].round(3)) for bar in bars) == [(1.0, 1.3), (1.1, 1.3)]


def test_series_of_engines_have_their_load_and_all_requests_of_all_rounds() -> None:
    rates = {"concurrency": None, "request_rate": 0.5, "max_num_batched_tokens": 2048}
    aggregated, layer, other, _ = of_serve({"cells": [serve_cell(), serve_cell(**rates)]})
    assert aggregated.ttft_ms == layer.exposed_ms == (1.0, 2.0, 3.0, 4.0)
    assert (aggregated.exposed_ms, aggregated.ratios) == ((), {})
    assert layer.ratios == {"aggregated": Ratio(1.1, 1.0, 1.2)}
    assert str(layer.where) == "2gbit, 4 at a time"
    assert str(other.where) == "2gbit, 2048 tokens a step, 0.5 per second"


def forward_cell(**changes: Any) -> dict[str, Any]:
    modes = {mode: {"raw": {"exposed_s": [0.001 * factor, 0.003 * factor]}} for mode, factor in MODES_EXPOSED.items()}
    cell = {"link": "1gbit", "model": "llama-8b", "ids": "random", "tokens": 4096, "ceiling": {}, "modes": modes}
    return cell | changes


MODES_EXPOSED = {"layer": 1, "request": 10}


def test_a_synthetic_forward_has_what_is_exposed_and_no_first_token(tmp_path: Path) -> None:
    cells = [forward_cell(), forward_cell(tokens=8192), forward_cell(link="2gbit")]
    series = of_forward({"cells": cells})
    assert series[0] == Series(Where("1gbit", "llama-8b, random blocks"), "layer", 4096, exposed_ms=(1.0, 3.0))
    (slow, fast) = panels(lengths.draw, series, tmp_path / "a.png", "title")
    assert curves(slow) == {"layer": [2.0, 2.0], "request": [20.0, 20.0]}
    assert slow.get_title("left") == "1gbit, llama-8b, random blocks: exposed after prefill"
    assert curves(fast) == {"layer": [2.0], "request": [20.0]}
    status, said = run(written(tmp_path / "forward.json", HEAD | {"cells": cells}))
    assert status == 0, said
    assert said.split() == [str(tmp_path / f"forward-{what}.png") for what in ("exposed", "links")]


def test_engines_over_several_links_become_a_sweep_of_one_file(tmp_path: Path) -> None:
    result = HEAD | {"cells": [serve_cell(), serve_cell(link="500mbit")]}
    status, said = run(written(tmp_path / "serve.json", result))
    assert status == 0, said
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["serve-links.png", "serve.png"]


def test_a_sweep_goes_by_the_speed_of_the_link(tmp_path: Path) -> None:
    series = [
        Series(Where(link), "layer", 64, (ms,), (ms / 10,))
        for link, ms in (("10gbit", 1.0), ("500mbit", 20.0), ("1gbit", 10.0), ("loopback", 0.5))
    ]
    first, exposed = panels(links.draw, series, tmp_path / "a.png", "title")
    (line,) = first.get_lines()
    assert list(line.get_xdata()) == [0.5, 1.0, 10.0]
    assert curves(first) == {"layer": [20.0, 10.0, 1.0]}
    assert curves(exposed) == {"layer": [2.0, 1.0, 0.1]}
    assert "64 tokens" in first.get_title("left")


def test_one_speed_is_no_sweep(tmp_path: Path) -> None:
    series = [Series(Where(link), "layer", 64, (1.0,)) for link in ("1gbit", "loopback")]
    with pytest.raises(ResultError, match="two speeds"):
        links.draw(series, tmp_path / "a.png", "title")


def test_a_cell_of_a_push_is_read_back_as_it_was() -> None:
    this = push_cell(2.3e-3)
    text = json.dumps(this.as_json())
    again = Cell.from_json(json.loads(text))
    assert (again.link, again.point, again.ways) == (this.link, this.point, this.ways)
    assert json.dumps(again.as_json()) == text


def test_results_become_pictures_beside_them(tmp_path: Path) -> None:
    cells = [push_cell(2.3e-3).as_json(), push_cell(2.3e-3, packs=False).as_json()]
    push = written(tmp_path / "push.json", HEAD | {"cells": cells})
    serve = written(tmp_path / "serve.json", serve_result())
    status, said = run(push, serve)
    assert status == 0, said
    assert said.split() == [str(tmp_path / "push.png"), str(tmp_path / "serve.png")]
    for name in ("push.png", "serve.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_files_of_several_speeds_become_a_sweep(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{link}.json", serve_result(link)) for link in ("1gbit", "500mbit")]
    out = tmp_path / "pictures"
    status, said = run(*files, "--out", out)
    assert status == 0, said
    assert sorted(path.name for path in out.iterdir()) == ["1gbit.png", "500mbit.png", "links.png"]


def test_without_arguments_what_can_be_drawn_is(tmp_path: Path) -> None:
    written(tmp_path / "serve.json", serve_result())
    written(tmp_path / "soak.json", HEAD | {"requests": {}})
    with mock.patch.object(command, "RESULTS", tmp_path):
        status, said = run("--out", tmp_path / "out")
    assert status == 0, said
    assert f"left out: {tmp_path / 'soak.json'}" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["serve.png"]


@pytest.mark.parametrize("text", ["", "[]", '{"cells": []}', '{"cells": [{"ways": 1}]}', '{"cells": [7]}'])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    status, said = run(path)
    assert status == 2
    assert str(path) in said


def test_the_committed_results_have_pictures(tmp_path: Path) -> None:
    """And those do not go beside them."""
    before = {path: path.stat().st_mtime_ns for path in command.RESULTS.iterdir()}
    with mock.patch.object(command, "OUTPUT", tmp_path):
        status, said = run(command.RESULTS / "serve.json")
    assert status == 0, said
    assert (tmp_path / "serve.png").read_bytes().startswith(PNG)
    assert {path: path.stat().st_mtime_ns for path in command.RESULTS.iterdir()} == before


def traces(folder: Path, **pushes: Sequence[dict[str, Any]]) -> Path:
    for mode, lines in pushes.items():
        (folder / mode).mkdir(parents=True)
        (folder / mode / "P.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_timeline_has_a_typical_push_of_each_mode(tmp_path: Path) -> None:
    pushes = [push_line(request_id=name, t_last_landed=at) for name, at in (("a", 11.9), ("b", 11.5), ("c", 11.45))]
    short = push_line(request_id="short", tokens=16, t_last_landed=11.5)
    lost = push_line(request_id="lost", outcome="failed")
    whole = push_line(request_id="w", mode="request")
    folder = traces(tmp_path / "trace", prefill=[*pushes, whole, short, lost], decode=[lost])
    with mock.patch.object(timeline, "draw_pushes") as drawn:
        assert timeline.draw(folder, tmp_path / "t.png") == "layer b, request w"
    assert list(drawn.call_args.args[0]) == ["layer", "request"]


def test_a_folder_of_one_mode_has_a_timeline(tmp_path: Path) -> None:
    folder = traces(tmp_path, layer=[push_line()]) / "layer"
    status, said = run(folder)
    assert status == 0, said
    assert (folder / "timeline.png").read_bytes().startswith(PNG)


def test_a_request_is_drawn_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    folder = traces(tmp_path, layer=[push_line(request_id="cmpl-x-0-0123abcd", decode_request_id=None), push_line()])
    status, said = run(folder, "--request", "cmpl-x", "--out", tmp_path / "out")
    assert status == 0, said
    assert "cmpl-x-0" in said
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("arguments", [(), ("--request", "nobody")])
def test_a_folder_without_such_a_push_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = traces(tmp_path / "odd", layer=[push_line(outcome="failed")])
    status, said = run(folder, *arguments)
    assert status == 2
    assert str(folder) in said


def test_help_teaches() -> None:
    _, said = run("--help")
    for word in ("time to first token", "exposed", "timeline", "link", "bench/results/serve.json", "--request"):
        assert word in said
