"""doctor: what it finds here, and what it says about machines that lack something."""

from __future__ import annotations

import importlib.metadata
import json
from collections import namedtuple

import pytest
import torch

from moonep.command import CommandFailure
from tools import doctor
from tools.doctor import GAP, NOTE, OK, DoctorConfig


def test_report_of_this_machine(tmp_path, capsys):
    findings = doctor.run(DoctorConfig(out=str(tmp_path)))
    out = capsys.readouterr().out
    assert f"{torch.__version__}" in out and "/dev/shm" in out and "No gaps" in out
    written = json.loads((tmp_path / "summary.json").read_text())
    assert [row["what"] for row in written] == [finding.what for finding in findings]
    assert all(finding.advice for finding in findings if finding.status != OK and finding.status == NOTE)


def test_a_missing_package_is_a_gap_with_the_command_that_fixes_it(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name):
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CommandFailure, match="before this is fixed: deepspeed"):
        doctor.run(DoctorConfig())
    assert "pip install 'deepspeed>=0.19.8'" in capsys.readouterr().out


@pytest.mark.parametrize(("free", "status", "said"), [(64 << 20, NOTE, "--shm-size"), (8 << 30, OK, "")])
def test_shared_memory(monkeypatch, free, status, said):
    usage = namedtuple("usage", "total used free")(2 * free, free, free)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    (finding,) = doctor.check_shared_memory()
    assert finding.status == status and said in finding.advice


def test_memory_of_expert_parallel_ranks(monkeypatch):
    for gpu, writable, said in [(True, True, "cuda"), (False, True, "shm"), (False, False, "collective")]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(doctor.os, "access", lambda path, mode, writable=writable: writable)
        (finding,) = doctor.check_memory()
        assert finding.found.startswith(said) and bool(finding.advice) == (said == "collective")


def test_a_driver_that_torch_cannot_use_is_a_gap(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(doctor, "_output", lambda *words: "570.1\n")
    (finding,) = doctor.check_gpus()
    assert finding.status == GAP and "570.1" in finding.found and "install a torch" in finding.advice


def test_gpus_without_peer_access_are_told_the_fallback(monkeypatch):
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 3})
    monkeypatch.setattr(doctor, "_nvlink", lambda: doctor.Finding("NVLink", OK, "18 links"))
    monkeypatch.setattr(doctor, "_check_nccl", list)
    peers = doctor._check_peers(4)[0]
    assert (
        peers.status == NOTE
        and "2 of 12 pairs" in peers.found
        and "parallel.memory=collective" in peers.advice
    )
    assert doctor._check_peers(3)[0].status == OK


def test_another_package_named_kernels_is_a_gap(monkeypatch, tmp_path):
    spec = namedtuple("spec", "origin")(str(tmp_path / "kernels" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    (finding,) = doctor.check_kernels_name()
    assert finding.status == GAP and str(tmp_path) in finding.found
    monkeypatch.undo()
    assert doctor.check_kernels_name()[0].status == OK


def test_no_compiler_matters_only_with_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.check_compiler()[0].status == GAP
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_compiler()[0].status == OK


def test_a_check_that_cannot_import_is_a_note():
    def check_gpus():
        import no_such_package  # noqa: F401

    (finding,) = doctor._guarded(check_gpus)()
    assert finding.status == NOTE and finding.what == "gpus" and "no_such_package" in finding.found


def test_programs_that_fail_say_nothing():
    assert doctor._output("no-such-program-here") == ""
    assert doctor._output("false") == ""
    assert doctor._output("echo", "hello") == "hello\n"
