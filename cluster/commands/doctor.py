"""`pagoda doctor`: whether this machine can serve, and what is wrong if it cannot."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from pagoda.cluster.commands.options import model_cache_option
from pagoda.cluster.doctor import examine

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@click.command()
@model_cache_option
@click.option("--host", default="127.0.0.1", help="Address that `pagoda serve` is to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port that it is to listen on.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=9000, help="gRPC port; 0 for none.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(context: click.Context, model_cache: Path, host: str, port: int, grpc_port: int, as_json: bool) -> None:
    """Check whether `pagoda serve` can work here, and say what to do if not.

    The exit status is 1 if it cannot.
    """
    findings = examine(model_cache=model_cache, host=host, port=port, grpc_port=grpc_port)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            status = click.style(f"{finding.status:7}", fg=_COLOURS[finding.status])
            advice = f": {finding.advice}" if finding.advice else ""
            click.echo(f"{status}  {finding.name:{width}}  {finding.found}{advice}")
    if any(finding.status == "error" for finding in findings):
        context.exit(1)
