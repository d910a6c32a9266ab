"""Versions of packages."""

from importlib.metadata import requires
from types import SimpleNamespace

from packaging.requirements import Requirement

from verl_padding.cli.doctor import installation


def test_a_version_that_is_not_supported_is_named_with_the_one_that_is(monkeypatch):
    versions = {"verl": ["0.8.0"], "ray": []}

    def distributions(name):
        return [SimpleNamespace(version=each) for each in versions.get(name, ["99.0"])]

    monkeypatch.setattr(installation, "distributions", distributions)
    found = {finding.subject: finding for finding in installation.versions()}
    assert found["verl"].verdict == "wrong"
    needed = {each.name: each for each in map(Requirement, requires("verl_padding") or [])}
    assert f"pip install '{needed['verl']}'" in found["verl"].message
    assert found["ray"].message.startswith("missing")
    assert found["wrapt"].verdict == "wrong"
