"""bench.plot: from results and traces to pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from bench import RESULTS
from bench.forward.growth import Line
from bench.plot import __main__ as command
from bench.plot import growth, lengths, links, timeline
from bench.plot.series import Series, Where, of_serve
from tests.unit.test_demo_figures import push_line

PNG = b"\x89PNG"


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(command.app, [str(each) for each in arguments])
    return done.exit_code, done.output


def curves(draw: Any, *arguments: Any) -> list[dict[str, list[float]]]:
    """The lines of each drawn panel, row by row: their heights by label."""
    kept: list[Any] = []
    with mock.patch("matplotlib.pyplot.close", kept.append):
        draw(*arguments)
    return [
        {line.get_label(): [float(y) for y in line.get_ydata()] for line in panel.get_lines()} for panel in kept[0].axes
    ]


def few(name: str, folder: Path) -> Path:
    """A committed result with its first cells only, of one link."""
    result = json.loads((RESULTS / f"{name}.json").read_text())
    path = folder / f"{name}.json"
    cells = [cell for cell in result["cells"] if cell.get("link") == result["cells"][0].get("link")]
    path.write_text(json.dumps(result | {"cells": cells[:4]}))
    return path


def test_the_committed_results_have_pictures(tmp_path: Path) -> None:
    """The pictures are not written beside the results."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    with mock.patch.object(command, "OUTPUT", tmp_path):
        status, said = run(RESULTS / "serve.json")
    assert status == 0, said
    assert (tmp_path / "serve.png").read_bytes().startswith(PNG)
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


def test_each_kind_of_result_has_a_picture_and_several_links_have_a_sweep(tmp_path: Path) -> None:
    status, said = run(*(few(name, tmp_path) for name in ("push", "kernel", "links", "serve")))
    assert status == 0, said
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == ["kernel.png", "links.png", "push.png", "serve.png"], "one speed is no sweep"
    out = tmp_path / "out"
    status, said = run(RESULTS / "links.json", RESULTS / "serve.json", "--out", out)
    assert status == 0, said
    assert {path.name for path in out.iterdir()} == {"links.png", "links-links.png", "serve.png", "by-link.png"}


def test_lengths_show_medians_ratios_and_exposed_time(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "serve.json").read_text())
    result["cells"] = [cell for cell in result["cells"] if (cell["link"], cell["concurrency"]) == ("loopback", 1)]
    first, ratios, exposed = curves(lengths.draw, of_serve(result), tmp_path / "a.png", "title")
    by_tokens = sorted(result["cells"], key=lambda cell: cell["prompt_tokens"])

    def medians(mode: str, measure: str) -> list[float]:
        return [cell["modes"][mode][measure]["p50"] for cell in by_tokens]

    assert first["pull"] == pytest.approx(medians("pull", "ttft_ms"))
    assert exposed["layer"] == pytest.approx(medians("layer", "exposed_ms"))
    stock = {"aggregated", "pull", "push"}
    assert set(exposed) == by_tokens[0]["modes"].keys() - stock, "the stock connectors keep no trace"
    of_aggregated = [cell["ratios"]["ttft_ms"]["auto/aggregated"]["ratio"] for cell in by_tokens]
    assert of_aggregated in list(ratios.values())


def test_the_growth_picture_has_a_panel_with_slopes_for_each_quantity_and_cost(tmp_path: Path) -> None:
    lines = [
        asdict(Line(what, mode, cost, (1, 2), (0.001, 0.003), slope=0.002, intercept=-0.001, r2=1.0))
        for what in ("layers", "ranks")
        for mode in ("auto", "request")
        for cost in ("hooks", *growth.SHOWN)
    ]
    path = few("links", tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lines": lines}))
    status, said = run(path)
    assert status == 0, said
    assert (tmp_path / "links-growth.png").read_bytes().startswith(PNG)
    panels = curves(growth.draw, growth.lines_of({"lines": lines}), tmp_path / "a.png", "title")
    assert len(panels) == 3 * 2
    for panel in panels[2:]:
        assert panel["auto +2 ms"] == pytest.approx([1.0, 3.0])
    assert panels[0]["request +0.002"] == pytest.approx([0.001, 0.003]), "WRITEs are a count, not a time"


def test_lines_without_a_count_of_writes_are_not_drawn() -> None:
    assert growth.lines_of({"cells": []}) == []
    assert growth.lines_of({"lines": [{"what": "layers", "slope_s": 0.1}]}) == []


def test_panels_with_only_the_exposed_time_stand_side_by_side(tmp_path: Path) -> None:
    series = [
        Series(Where("loopback", f"model {number}"), mode, tokens, exposed_ms=(number + tokens / 1024,))
        for number in range(3)
        for mode in ("auto", "request")
        for tokens in (4096, 131072)
    ]
    panels = curves(lengths.draw, series, tmp_path / "a.svg", "title")
    assert [panel.get("auto") for panel in panels] == [[4.0, 128.0], [5.0, 129.0], [6.0, 130.0], None]
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()


def test_a_sweep_is_ordered_by_link_speed(tmp_path: Path) -> None:
    series = [
        Series(Where(link), "layer", 64, (ms,), (ms / 10,))
        for link, ms in (("10gbit", 1.0), ("500mbit", 20.0), ("1gbit", 10.0), ("loopback", 0.5))
    ]
    assert links.speeds(series) == [0.5, 1.0, 10.0]
    first, exposed = curves(links.draw, series, tmp_path / "a.png", "title")
    assert first == {"layer": [20.0, 10.0, 1.0]}
    assert exposed == {"layer": [2.0, 1.0, 0.1]}


def test_without_arguments_every_result_that_has_a_picture_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "soak.json").write_text('{"requests": {}}')
    few("push", tmp_path)
    with mock.patch.object(command, "RESULTS", tmp_path):
        status, said = run("--out", tmp_path / "out")
    assert status == 0, said
    assert f"left out: {tmp_path / 'soak.json'}" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["push.png"]


@pytest.mark.parametrize("text", ["", "[]", '{"cells": []}', '{"cells": [{"ways": 1}]}', '{"cells": [7]}'])
def test_the_error_names_a_file_without_a_result(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    status, said = run(path)
    assert status == 2
    assert str(path) in said


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
    assert timeline.draw(folder, tmp_path / "t.png") == "layer b, request w"
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)


def test_the_request_option_draws_the_timeline_of_that_request(tmp_path: Path) -> None:
    folder = traces(tmp_path, layer=[push_line(request_id="cmpl-x-0-0123abcd", decode_request_id=None), push_line()])
    status, said = run(folder, "--request", "cmpl-x", "--out", tmp_path / "out")
    assert status == 0, said
    assert "cmpl-x-0" in said
    assert (tmp_path / "out/timeline.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("arguments", [(), ("--request", "nobody")])
def test_the_error_names_a_folder_without_a_matching_push(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = traces(tmp_path / "odd", layer=[push_line(outcome="failed")])
    status, said = run(folder, *arguments)
    assert status == 2
    assert str(folder) in said
