"""What is found in a tree of source."""

from verl_padding.job.verl_source import VerlSource


def test_a_definition_is_found_by_its_code_alone_not_by_its_docstring(tmp_path):
    (tmp_path / "file.py").write_text(
        'class Trainer:\n    def fit(self):\n        """self.step()"""\n        # self.step()\n'
        "        self.other.step()\n        self.step_back(x, key='step')\n"
    )
    verl = VerlSource(tmp_path)
    assert verl.lacks("file.py", "Trainer.fit", ("self.step(", "step(", "self.step")) == (
        "has no self.step(, step(, self.step"
    )
    assert verl.lacks("file.py", "Trainer.fit", ("self.step_back(", "'step'", "key=")) == ""
    assert verl.lacks("file.py", "Trainer.step", ("x",))
    assert verl.lacks("other.py", "Trainer", ("x",))
