"""`layerpush proxy`. Options that vllm-project/router has, too, have the same names."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

PREFILL, DECODE, IDENTITY = "--prefill", "--decode", "--prefill-identity"
Choice = Literal["round_robin", "least_outstanding_tokens", "prefix_affinity"]

_ENGINES, _DISPATCH, _LIMITS, _HEALTH = "Engines", "Dispatch", "Limits", "Health checks"


def proxy(
    prefill: Annotated[
        list[str],
        typer.Option(
            PREFILL, metavar="URL", help="API server of a prefill engine; repeat it for more.", rich_help_panel=_ENGINES
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option(
            DECODE, metavar="URL", help="API server of a decode engine; repeat it for more.", rich_help_panel=_ENGINES
        ),
    ],
    prefill_identity: Annotated[
        list[str] | None,
        typer.Option(
            IDENTITY,
            metavar="URL=JSON",
            help="Identity of a prefill engine, so that the proxy need not ask for it: remote_engine_id, remote_host, "
            "remote_port, tp_size, pp_size, as in kv_transfer_params.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_API_KEY",
            show_envvar=True,
            help="API key for the proxy's own requests to engines. The proxy passes on clients' own keys.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 30000,
    policy: Annotated[
        Choice, typer.Option(help="How to choose the engine for a request.", rich_help_panel=_DISPATCH)
    ] = "least_outstanding_tokens",
    prefill_policy: Annotated[
        Choice | None, typer.Option(help="Policy for prefill engines only.", rich_help_panel=_DISPATCH)
    ] = None,
    decode_policy: Annotated[
        Choice | None, typer.Option(help="Policy for decode engines only.", rich_help_panel=_DISPATCH)
    ] = None,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential",
            help="Ask D only after P has answered. Then P pushes whole requests after prefill.",
            rich_help_panel=_DISPATCH,
        ),
    ] = False,
    retry_max_retries: Annotated[
        int,
        typer.Option(min=0, help="Retries of a request before its first token.", rich_help_panel=_DISPATCH),
    ] = 2,
    max_concurrent_requests: Annotated[
        int, typer.Option(min=1, help="Largest number of requests at a time.", rich_help_panel=_LIMITS)
    ] = 1024,
    queue_size: Annotated[
        int,
        typer.Option(
            min=0, help="Largest number of waiting requests; further ones get HTTP status 429.", rich_help_panel=_LIMITS
        ),
    ] = 100,
    queue_timeout_secs: Annotated[
        float, typer.Option(min=0.001, help="Longest wait in the queue.", rich_help_panel=_LIMITS)
    ] = 60.0,
    max_payload_size: Annotated[
        int, typer.Option(min=1, help="Largest request body, in bytes.", rich_help_panel=_LIMITS)
    ] = 512 << 20,
    connect_timeout_secs: Annotated[
        float, typer.Option(min=0.001, help="Deadline for a connection to an engine.", rich_help_panel=_LIMITS)
    ] = 5.0,
    first_token_timeout_secs: Annotated[
        float,
        typer.Option(min=0.001, help="Deadline for P's answer, and for the begin of D's.", rich_help_panel=_LIMITS),
    ] = 600.0,
    stream_idle_timeout_secs: Annotated[
        float, typer.Option(min=0.001, help="Longest pause in D's answer.", rich_help_panel=_LIMITS)
    ] = 300.0,
    request_timeout_secs: Annotated[
        float,
        typer.Option(
            min=0.001, help="Deadline for a whole request, including its wait in the queue.", rich_help_panel=_LIMITS
        ),
    ] = 1800.0,
    drain_timeout_secs: Annotated[
        int,
        typer.Option(min=0, help="After SIGTERM, deadline for the requests that run.", rich_help_panel=_LIMITS),
    ] = 300,
    health_check_interval_secs: Annotated[
        float, typer.Option(min=0.01, help="Time between two checks of an engine.", rich_help_panel=_HEALTH)
    ] = 5.0,
    health_check_timeout_secs: Annotated[
        float, typer.Option(min=0.001, help="Deadline for one check.", rich_help_panel=_HEALTH)
    ] = 5.0,
    health_failure_threshold: Annotated[
        int,
        typer.Option(min=1, help="Failed checks in a row that take an engine out of service.", rich_help_panel=_HEALTH),
    ] = 3,
    health_success_threshold: Annotated[
        int, typer.Option(min=1, help="Passed checks in a row that bring it back.", rich_help_panel=_HEALTH)
    ] = 2,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest severity to log.")
    ] = "info",
) -> None:
    """Serve vLLM's OpenAI-compatible API in front of prefill and decode engines.

    The proxy sends every prompt to a prefill engine (P) and a decode engine (D) at the same time. So P can push each
    layer's KV while it computes the next one. The client gets D's answer, byte for byte.

    Example:  layerpush proxy --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 --port 8000

    The proxy asks each P for its engine id and side channel, at the start and whenever P comes back. If P does not
    give them, the proxy logs the reason and asks D only after P has answered.

    It serves /v1/completions, /v1/chat/completions, /v1/models, /health and /metrics. If an engine fails before the
    first token, the proxy sends the request to other engines. After SIGTERM it accepts no new connections and
    finishes the requests that run.

    Exit status: 0 after SIGTERM or SIGINT, 1 if the port is not available, 2 for bad options.
    """
    from layerpush.apps.proxy.policy import Policy
    from layerpush.apps.proxy.server import serve
    from layerpush.apps.proxy.settings import Settings, SettingsError, engine_urls, identities

    try:
        prefill_urls = engine_urls(PREFILL, prefill)
        settings = Settings(
            prefill=prefill_urls,
            decode=engine_urls(DECODE, decode),
            identities=identities(IDENTITY, prefill_identity or (), prefill_urls),
            prefill_policy=Policy(prefill_policy or policy),
            decode_policy=Policy(decode_policy or policy),
            sequential=sequential,
            api_key=api_key,
            max_concurrent_requests=max_concurrent_requests,
            queue_size=queue_size,
            queue_timeout_s=queue_timeout_secs,
            max_payload_size=max_payload_size,
            retry_max_retries=retry_max_retries,
            connect_timeout_s=connect_timeout_secs,
            first_token_timeout_s=first_token_timeout_secs,
            stream_idle_timeout_s=stream_idle_timeout_secs,
            request_timeout_s=request_timeout_secs,
            health_check_interval_s=health_check_interval_secs,
            health_check_timeout_s=health_check_timeout_secs,
            health_failure_threshold=health_failure_threshold,
            health_success_threshold=health_success_threshold,
        )
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    if not serve(settings, host, port, drain_timeout_secs, log_level):
        raise typer.Exit(1)
