"""The generated modules are those of the .proto files."""

import subprocess
import sys
from pathlib import Path

from pagoda.proto import inference_pb2, tokens_pb2

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
