"""The generated modules are those of the .proto files."""

import subprocess
import sys
from pathlib import Path

from pagoda.proto import directory_pb2, inference_pb2, tokens_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    """`make proto` again changes nothing."""
    sources = sorted((ROOT / "proto").glob("*.proto"))
    assert sources
    (tmp_path / "pagoda").mkdir()
    (tmp_path / "pagoda" / "proto").symlink_to(ROOT / "proto")
    out = tmp_path / "out"
    out.mkdir()
    options = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(tmp_path), *options]
    subprocess.run([*command, *(f"pagoda/proto/{source.name}" for source in sources)], cwd=tmp_path, check=True)
    generated = sorted((out / "pagoda" / "proto").iterdir())
    assert len(generated) == 3 * len(sources)
    for path in generated:
        assert path.read_text() == (ROOT / "proto" / path.name).read_text(), f"{path.name}: run make proto"


def test_old_messages_still_parse() -> None:
    """Bytes that an earlier build wrote: numbers of fields must not be given to others."""
    abort = tokens_pb2.SessionCommand.FromString(bytes.fromhex("12050a01721001"))
    assert (abort.abort.request_id, abort.abort.index) == ("r", 1)
    chat = inference_pb2.ChatRequest.FromString(bytes.fromhex("0a016d12090a0475736572120168"))
    assert (chat.model, chat.messages[0].role, chat.messages[0].content) == ("m", "user", "h")
    update = directory_pb2.WorkerUpdate.FromString(
        bytes.fromhex("121e080310021a181216080110021a10000102030405060708090a0b0c0d0e0f")
    )
    (event,) = update.events.events
    assert (update.events.epoch, update.events.seq) == (3, 2)
    assert (event.removed.tier, event.removed.group, event.removed.hashes) == (1, 2, bytes(range(16)))
    load = directory_pb2.WorkerUpdate.FromString(bytes.fromhex("22120807320909000000000000e03f3a01725009")).load
    assert (load.num_uncached_tokens, load.rates.prefill_s_per_token, load.admitted[0], load.last_seq) == (
        7,
        0.5,
        "r",
        9,
    )
    place = directory_pb2.PlaceRequest.FromString(
        bytes.fromhex("0a017212016d1a10000102030405060708090a0b0c0d0e0f201128023a0177")
    )
    assert (place.request_id, place.model, place.hashes) == ("r", "m", bytes(range(16)))
    assert (place.num_tokens, place.num_samples, place.exclude[0]) == (17, 2, "w")
    ack = directory_pb2.DirectoryAck.FromString(bytes.fromhex("080210051a0164"))
    assert (ack.status, ack.last_seq, ack.directory_id) == (directory_pb2.DirectoryAck.DATA_LOSS, 5, "d")
