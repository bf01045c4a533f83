"""``twostroke route`` puts a router before servers that speak OpenAI's interface."""

from __future__ import annotations

from pathlib import Path

import typer

from twostroke.cli.console import JSON_HELP, emit, log
from twostroke.core.errors import ConfigError
from twostroke.core.units import format_count

app = typer.Typer(add_completion=False)


@app.command(name="route")
def route(
    urls: list[str] = typer.Argument(help="Servers, such as http://127.0.0.1:8000. They may serve different models."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Anything but loopback needs --api-key-file."),
    port: int = typer.Option(8080, min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    api_key_file: Path | None = typer.Option(
        None, help="File of accepted API keys, one a line. A request's key is passed on as it came in any case."
    ),
    without_key: bool = typer.Option(False, help="Let other machines in without an API key."),
    endpoint_key_file: Path | None = typer.Option(
        None, help="File whose first key the router itself uses to ask the servers what they serve."
    ),
    grace_s: float = typer.Option(30.0, min=0.0, help="Seconds that requests in flight get to finish after SIGTERM."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Route requests to the server that is predicted to answer first, until SIGTERM or Ctrl-C."""
    import logging

    from twostroke.server.keys import ApiKeys, read_keys
    from twostroke.server.launch import bind, is_loopback
    from twostroke.server.router.endpoint import Endpoint
    from twostroke.server.router.run import base_urls, run_router
    from twostroke.server.run import url_of

    found = base_urls(urls)
    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    endpoint_key = "" if endpoint_key_file is None else read_keys(endpoint_key_file)[0]
    if keys is None and not is_loopback(host) and not without_key:
        raise ConfigError(f"host={host} lets other machines in, and there is no --api-key-file. Give one, or --without-key.")
    listener = bind(host, port)
    address = listener.getsockname()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")

    def announce(endpoints: list[Endpoint]) -> None:
        up = [endpoint.url for endpoint in endpoints if endpoint.up]
        models = sorted({name for endpoint in endpoints for name in endpoint.models or ()})
        line = f"routing at {url_of(address)}/v1 to {len(endpoints)} servers, {len(up)} of which take requests"
        emit({"url": url_of(address), "endpoints": found, "up": up, "models": models}, line, as_json)

    try:
        totals = run_router(found, listener, keys, endpoint_key, grace_s, announce)
    finally:
        listener.close()
    log("stopped after " + ", ".join(f"{format_count(value)} {name}" for name, value in totals.items()))
