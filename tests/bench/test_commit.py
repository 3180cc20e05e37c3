"""The commit that reports of benchmarks name."""

import subprocess
from pathlib import Path

from vllm_opset.bench import report


def git(folder: Path, *words: str) -> str:
    """Runs git in a folder as a user of its own."""
    user = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    return subprocess.run(["git", "-C", folder, *user, *words], check=True, capture_output=True, text=True).stdout


def test_a_repository_around_the_environment_is_not_this_projects(tmp_path, monkeypatch):
    """An environment often lies in the checkout of another project."""
    module = tmp_path / ".venv" / "vllm_opset" / "bench" / "report.py"
    module.parent.mkdir(parents=True)
    module.touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "Another project")
    monkeypatch.delenv("OPSET_COMMIT", raising=False)
    monkeypatch.setattr(report, "__file__", str(module))
    assert report.commit() is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "This project")
    assert report.commit() == git(tmp_path, "rev-parse", "--short=12", "HEAD").strip()
    module.write_text("changed")
    assert report.commit().endswith("-dirty")
