from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from lazydecode.cli.main import cli
from lazydecode.cli.settings_options import settings_from_flags, settings_options
from lazydecode.config import Settings
from tests.builders import make_jpeg


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def parse(*arguments: str) -> Settings:
    """Settings as a command would get them."""
    found: list[Settings] = []

    @click.command()
    @settings_options()
    def command(**flags: Any) -> None:
        found.append(settings_from_flags(flags))

    result = CliRunner().invoke(command, list(arguments))
    if result.exit_code:
        raise AssertionError(result.output)
    return found[0]


def test_every_setting_is_a_flag_with_its_help_and_default() -> None:
    text = run("serve", "--help").output
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description
        assert " ".join(field.description.split()[:2]) in " ".join(text.split())
    assert "[default: 178956970]" in " ".join(text.split())


def test_flags_become_settings() -> None:
    settings = parse(
        "--allowed-media-domains", "a.test", "--allowed-media-domains", "b.test",
        "--allowed-private-networks", "10.0.0.0/8", "--allowed-local-media-path", "/srv",
        "--no-media-redirects", "--https-only", "--no-request-kwargs", "--engine", "none",
        "--served-model-name", "m", "--limit-mm-per-prompt", '{"image": 3}', "--port", "0",
    )  # fmt: skip
    assert settings.allowed_media_domains == ("a.test", "b.test")
    assert settings.allowed_private_networks == ("10.0.0.0/8",)
    assert settings.allowed_local_media_path == Path("/srv")
    assert not settings.media_redirects
    assert settings.https_only
    assert not settings.request_kwargs
    assert settings.engine == "none"
    assert settings.served_model_name == ("m",)
    assert settings.limit_mm_per_prompt == {"image": 3}


def test_flags_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('port = 1\nmax-video-frames = 2\nhost = "file"\n')
    monkeypatch.setenv("LAZYDECODE_PORT", "3")
    monkeypatch.setenv("LAZYDECODE_HOST", "environment")
    settings = parse("--config", str(config), "--port", "4")
    assert (settings.port, settings.host, settings.max_video_frames) == (4, "environment", 2)


def test_a_json_file_will_do_and_an_unknown_key_is_named(tmp_path: Path) -> None:
    config = tmp_path / "settings.json"
    config.write_text(json.dumps({"port": 9}))
    assert parse("--config", str(config)).port == 9
    config.write_text(json.dumps({"prot": 9}))
    with pytest.raises(AssertionError, match="prot"):
        parse("--config", str(config))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("serve",), "MODEL"),
        (("serve", "m", "--port", "x"), "--port"),
        (("serve", "m", "--port", "70000"), "--port"),
        (("serve", "m", "--limit-mm-per-prompt", "[1]"), "not a JSON object"),
        (("serve", "m", "--engine", "steam"), "--engine"),
        (("render", "m", "/does/not/exist.json"), "No such file"),
        (("inspect",), "FILE|URL|MODEL"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_use_is_exit_status_2_and_names_the_mistake(
    arguments: tuple[str, ...], text: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_inspect_shows_identity_and_header_without_decoding(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(make_jpeg(size=(64, 48)))
    result = run("inspect", path, "--json")
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["modality"] == "image"
    assert report["header"]["width"] == 64
    assert len(report["key"]) == 64
    assert "decoded" not in report


def test_inspect_decode_adds_what_came_out(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(make_jpeg(size=(64, 48)))
    report = json.loads(run("inspect", path, "--json", "--decode").output)
    assert report["decoded"] == {"width": 64, "height": 48, "mode": "RGB"}


def test_inspect_goes_on_after_a_bad_file_and_fails_at_the_end(tmp_path: Path) -> None:
    good, cut = tmp_path / "good.jpg", tmp_path / "cut.jpg"
    good.write_bytes(make_jpeg(size=(64, 48)))
    cut.write_bytes(make_jpeg(size=(64, 48))[:200])
    result = run("inspect", tmp_path / "none.jpg", cut, good, "--json", "--decode")
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert result.exit_code == 1
    assert "error" in lines[0]
    assert "error" in lines[1]
    assert lines[2]["decoded"]["width"] == 64


def test_inspect_obeys_the_url_policy() -> None:
    result = run("inspect", "http://127.0.0.1:9/x.png")
    assert result.exit_code == 1
    assert "127.0.0.1" in result.output


def test_help_imports_neither_torch_nor_the_server() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from lazydecode.cli.main import cli;"
        "r = CliRunner().invoke(cli, ['serve', '--help']); assert r.exit_code == 0, r.output;"
        "bad = {'torch', 'transformers', 'uvicorn'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=180)
