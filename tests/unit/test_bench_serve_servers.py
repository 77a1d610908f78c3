"""The servers of each mode: their commands, the user's own servers, and the figures from engines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.serve.background import TOKENS as BACKGROUND_TOKENS
from bench.serve.engine_options import EngineOptions, ServedModel
from bench.serve.lineup import Lineup
from bench.serve.plan import AGGREGATED, MODES, TOKEN, Pace
from bench.serve.scrape import FIRST_TOKENS, PREFILL, Meter
from bench.servers.engines import ServerPlace
from tests.support.http_servers import QuietHandler, serving
from tests.unit.serve_stubs import plan

MODEL = ServedModel(Path("/models/demo"), Path("/models/words"), 32768, 1000)
EVERY = list(MODES)


def lineup(
    load: Pace | None = None,
    tokens: int = 4096,
    model: ServedModel = MODEL,
    place: ServerPlace | None = None,
    **options: object,
) -> Lineup:
    this = plan(lengths=[tokens], answer_tokens=16, loads=[load or Pace()])
    places = (place,) if place else ()
    return Lineup(model, this, EngineOptions(**options), 256, Path("/traces"), *places)


def test_layerpush_modes_share_one_d_and_stock_modes_have_their_own() -> None:
    names = [spec.name for spec in lineup().engines(EVERY)]
    assert len(names) == len(set(names)) == 14
    assert [name for name in names if name.endswith("decode")] == [
        "pull-decode",
        "push-decode",
        "mooncake-decode",
        "layerpush-decode",
        "token-decode",
    ]
    assert [spec.name for spec in lineup().engines([AGGREGATED, "layer"])] == [
        AGGREGATED,
        "layer-prefill",
        "layerpush-decode",
    ]


def test_each_mode_has_its_connector() -> None:
    this = lineup()
    connectors = {mode: this.prefill(mode).transfer_config() for mode in MODES}
    assert connectors[AGGREGATED] is None
    found = {mode: config["kv_connector"] for mode, config in connectors.items() if config}
    assert (found["pull"], found["push"]) == ("NixlConnector", "NixlPushConnector")
    assert {found[mode] for mode in ("request", "chunk", "layer", "auto")} == {"LayerwisePushConnector"}
    assert connectors["layer"] is not None
    assert connectors["layer"]["kv_connector_extra_config"] == {
        "layerwise": True,
        "granularity": "layer",
        "trace_dir": "/traces/layer",
    }
    ds = {mode: (spec := this.decode(mode)) and spec.extra_config for mode in ("auto", TOKEN, "push", "pull")}
    assert ds == {
        "auto": {"trace_dir": "/traces/decode", "first_token": "decode"},
        TOKEN: {"trace_dir": "/traces/token-decode", "first_token": "prefill"},
        "push": {},
        "pull": {},
    }
    granularities = {mode: this.prefill(mode).extra_config.get("granularity") for mode in ("auto", TOKEN)}
    assert granularities == {"auto": "auto", TOKEN: "auto"}
    assert connectors["pull"] is not None
    assert connectors["pull"]["kv_connector_extra_config"] == {}
    assert connectors["pull"]["kv_role"] == "kv_producer"


def test_engines_have_room_for_all_streams_and_one_more() -> None:
    one, eight = lineup(), lineup(Pace(8))
    assert one.max_model_len == 4192  # whole blocks
    assert one.kv_cache_bytes == (2 * 4192 + 128) * 1000
    assert eight.kv_cache_bytes == (9 * 4192 + 128) * 1000
    assert "12" not in eight.prefill("layer").command(1)
    assert lineup(Pace(1, background=4)).kv_cache_bytes == (2 * 4192 + 128 + 4 * BACKGROUND_TOKENS) * 1000
    longest = lineup(tokens=EngineOptions().longest_prompt(16))
    assert longest.max_model_len == 32768


def test_engines_get_their_arguments_environment_and_place() -> None:
    place = ServerPlace(
        host="10.76.0.1", http_host="10.77.0.2", device="lpd", command_prefix=("ip", "netns", "exec", "p")
    )
    this = lineup(options=("--dtype", "bfloat16"), variables={"UCX_TLS": "cuda_ipc"}, place=place)
    spec = this.prefill("layer")
    command = spec.command(18100)
    assert command[:4] == ["ip", "netns", "exec", "p"]
    assert command[command.index("--max-num-batched-tokens") + 1] == "256"
    assert command[command.index("--tokenizer") + 1] == "/models/words"
    assert "--skip-tokenizer-init" not in command
    assert command[-2:] == ["--dtype", "bfloat16"]  # after our options, so the user's win
    many = lineup(Pace(12), options=("--max-num-seqs", "99"))
    assert many.prefill("layer").command(1)[-4:] == ["--max-num-seqs", "12", "--max-num-seqs", "99"]
    assert lineup(Pace(8, background=4)).prefill("layer").command(1)[-2:] == ["--max-num-seqs", "12"]
    assert spec.environment(5600)["UCX_TLS"] == "cuda_ipc"
    assert this.prefill(AGGREGATED).place == this.proxy("layer", "http://p", "http://d", 5600).place == ServerPlace()


def test_each_mode_has_a_proxy() -> None:
    for mode in EVERY[1:]:
        command = lineup().proxy(mode, "http://p:1", "http://d:2", 5600).command(18101)
        assert command[command.index("--prefill") + 1] == "http://p:1"
        assert command[command.index("--decode") + 1] == "http://d:2"


def test_the_proxy_of_mooncake_knows_p_which_has_a_bootstrap_server() -> None:
    this = lineup(place=ServerPlace(host="10.76.0.1"))
    p = this.prefill("mooncake")
    command = this.proxy("mooncake", "http://p:1", "http://d:2", 5600).command(18101)
    assert command[2:5] == ["bench.serve.mooncake_proxy", p.name, "http://10.76.0.1:5600"]
    assert p.environment(5600)["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "5600"
    assert (config := p.transfer_config())
    assert (config["kv_connector"], config["kv_connector_module_path"]) == ("MooncakeConnector", "bench.serve.mooncake")
    assert config["kv_connector_extra_config"] == {"mooncake_protocol": "tcp"}


def test_a_model_of_the_user_is_read_from_its_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    model = ServedModel.of_directory(tmp_path)
    assert (model.longest, model.tokenizer, model.kv_bytes_per_token) == (131072, tmp_path, None)
    assert "--kv-cache-memory-bytes" not in lineup(model=model).prefill("layer").command(1)
    with pytest.raises(ValueError, match=r"config\.json"):
        ServedModel.of_directory(tmp_path / "nothing")


@contextlib.contextmanager
def served(body: Callable[[], str]) -> Iterator[str]:
    """A server that answers each GET with the text of ``body``."""

    class TextHandler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(body().encode())

    with serving(TextHandler) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def metrics(total: float, count: int) -> str:
    half = f'{{engine="0"}} {total / 2}\n{PREFILL}_sum{{engine="1"}} {total / 2}'
    buckets = f'{PREFILL}_bucket{{engine="0",le="+Inf"}} {count}'
    return f'# TYPE {PREFILL} histogram\n{buckets}\n{PREFILL}_count{{engine="0"}} {count}\n{PREFILL}_sum{half}\n'


def test_the_meter_waits_for_late_observations() -> None:
    looks = iter([metrics(1.0, 1), metrics(1.0, 1), metrics(4.0, 2), metrics(7.0, 3)])
    with served(lambda: next(looks)) as url:
        meter = Meter(url, PREFILL, patience_s=60)
        assert meter.since(2) == {"sum": 6.0, "count": 2}
    assert meter.problems == []


def test_the_meter_reports_missing_observations() -> None:
    with served(lambda: metrics(1.0, 1)) as url:
        meter = Meter(url, PREFILL, patience_s=0)
        assert meter.since(2)["count"] == 0
    assert meter.problems == [f"{url}/metrics counts 0 of 2 {PREFILL}"]
    assert meter.since(1) == {}, "the server is gone"
    assert "refused" in meter.problems[-1]


def first_tokens(prefill: int, late: int) -> str:
    counts = {"prefill": prefill, "late": late}
    samples = [f'{FIRST_TOKENS}_total{{engine="0",origin="{origin}"}} {n}\n' for origin, n in counts.items()]
    return f"# TYPE {FIRST_TOKENS}_total counter\n{''.join(samples)}"


def test_first_tokens_are_counted_by_origin_once_all_are_reported() -> None:
    looks = iter([first_tokens(5, 1), first_tokens(6, 1), first_tokens(7, 2)])
    with served(lambda: next(looks)) as url:
        assert Meter(url, FIRST_TOKENS, patience_s=60).since(3) == {"prefill": 2, "late": 1}
    assert Meter(None, FIRST_TOKENS).since(3) == {}
