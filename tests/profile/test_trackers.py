"""Whether a tracker's package is there is looked up without importing it, and a folder of its name is none."""

from pathlib import Path

import pytest

from nftctl.profile.load import bundled_profiles, load_profile
from nftctl.profile.preflight import check


def codes(*sets: str) -> list[str]:
    return [f.code for f in check(load_profile(bundled_profiles()["tiny_t2i_cpu"], sets=sets, env={}))]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_installed_tracker_is_accepted_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / name).mkdir()
    (tmp_path / name / "run.log").touch()
    assert codes(f"logging.{name}=true") == ["tracker-missing"]
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))  # what was found before is forgotten
    assert codes(f"logging.{name}=true") == []


@pytest.mark.parametrize(
    ("name", "fine"), [("nftctl", True), ("a.b_c-9", True), ("x" * 128, True), ("x" * 129, False), ("a b", False)]
)
def test_the_name_of_a_project(name: str, fine: bool) -> None:
    assert codes(f'logging.project="{name}"') == ([] if fine else ["tracker-project"])
