# SPDX-License-Identifier: Apache-2.0
"""What gcloud is asked, word for word, for pods of 1, 4 and 8 hosts; and what becomes of its failures."""

import functools
import json
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import types

import pytest

from pods import deploy, hosts, launch, life, recipes, settings
from pods.calls import PERMANENT, TRANSIENT, call
from pods.connection import connect
from pods.errors import PodError
from pods.settings import check_worker, worker_numbers
from pods.transports import Result
from tests.pods.recording import BASE, OPTIMIZED, POD, Recorder, check_flags
from tests.support import ROOT

SCOPE = ["--zone=us-central2-b", "--project=my-project"]
ACCEL = {1: "v4-8", 4: "v4-32", 8: "v4-64"}
NAME, CODE = "aura-v4-32", "~/aura_tpu"
COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def gcloud(tmp_path):
    return Recorder(tmp_path)


def vm(verb: str, *words: str) -> list[str]:
    return ["compute", "tpus", "tpu-vm", *verb.split(), *words]


def queued(verb: str, *words: str) -> list[str]:
    return ["compute", "tpus", "queued-resources", *verb.split(), *words]


PATIENCE = ("-oConnectTimeout=10", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")
SSH, SCP = ([f"--{name}-flag={option}" for option in PATIENCE] for name in ("ssh", "scp"))


def ssh(worker: str, command: str) -> list[str]:
    return vm("ssh", NAME, *SCOPE, f"--worker={worker}", f"--command={command}", *SSH)


def shared(*words: str, **environment: str) -> settings.Settings:
    """Settings as `pod` below gives them."""
    return settings.read(list(words), {"NAME": NAME, "REPO_DIR": CODE, **environment})[0]


def backup_of(num_hosts: int, target: str) -> list[list[str]]:
    """Return the calls that copy the models of a pod without a bucket; those of several hosts are joined here."""
    models, describe = f"{NAME}:{CODE}/models", vm("describe", NAME, *SCOPE, "--format=json")
    if num_hosts == 1:
        return [describe, vm("scp", models, target, *SCOPE, "--worker=0", "--recurse", *SCP)]
    return [describe] + [
        vm("scp", models, f"{target}/PARTS/worker-{number}", *SCOPE, f"--worker={number}", "--recurse", *SCP)
        for number in range(num_hosts)
    ]


def lifecycle(accel: str, num_hosts: int) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return {what: (words typed, calls expected)} of all that does not look at the number of hosts."""
    describe = vm("describe", NAME, *SCOPE, "--format=json")
    software = "tpu-ubuntu2204-base"
    secret = "--metadata-from-file=torus-run-secret=SECRET"
    create = vm("create", NAME, *SCOPE, f"--accelerator-type={accel}", f"--version={software}")
    request = [*SCOPE, f"--accelerator-type={accel}", f"--runtime-version={software}"]
    more = "--network=n --subnetwork=s --internal-ips --service-account=a@b --scopes=https://x/auth/cloud-platform"
    more += " --labels=a=b,c=d --metadata=e=f --tags=g,h --data-disk=source=d,mode=read-only"
    poll = queued("describe", NAME, *SCOPE, "--format=value(state.state)")
    models = f"{NAME}:{CODE}/models"
    return {
        "versions": (["versions"], [vm("versions list", *SCOPE), vm("accelerator-types list", *SCOPE)]),
        "create": (["create"], [[*create, secret]]),
        "spot": (["create", "--spot"], [[*create, "--spot", secret]]),
        "reserved": (["create", "--reserved"], [[*create, "--reserved", secret]]),
        "options": (["create", *more.split()], [[*create, *more.split(), secret]]),
        "shape": (["create", "--type=v4", "--topology=2x2x4"], [
            vm("create", NAME, *SCOPE, "--type=v4", "--topology=2x2x4", f"--version={software}", secret)]),
        "queued": (["create", "--queued", "--spot", "--valid-until-duration=6h"], [
            queued("create", NAME, f"--node-id={NAME}", *request, "--spot", "--valid-until-duration=6h", secret)]),
        "slices": (["create", "--queued", "--slices=2", "--queued_resource=q"], [
            queued("create", "q", "--node-count=2", f"--node-prefix={NAME}", *request, secret)]),
        "wait": (["wait"], [describe]),
        "wait queued": (["wait", "--queued"], [poll]),
        "describe": (["describe"], [describe]),
        "ssh": (["ssh", "--", "ls -la ~/aura_tpu"], [ssh("all", "ls -la ~/aura_tpu")]),
        "ssh words": (["ssh", "--worker=0", "--", "echo", "a b"], [ssh("0", "echo 'a b'")]),
        "copy up": (["copy", "configs", f"{NAME}:~/app"], [
            vm("scp", "configs", f"{NAME}:~/app", *SCOPE, "--worker=all", "--recurse", *SCP)]),
        "copy file": (["copy", "pod.py", f"{NAME}://remote/path/", "--worker=0"], [
            vm("scp", "pod.py", f"{NAME}:/remote/path/", *SCOPE, "--worker=0", *SCP)]),
        "copy down": (["copy", f"{NAME}:{CODE}/models", "OUT/models", "--worker=0"], [
            vm("scp", models, "OUT/models", *SCOPE, "--worker=0", "--recurse", *SCP)]),
        "backup": (["backup", "OUT/backup"], backup_of(num_hosts, "OUT/backup")),
        "backup bucket": (["backup", "OUT/bucket", "--bucket=b"], [
            ["storage", "rsync", "-r", f"gs://b/runs/{NAME}/models", "OUT/bucket"]]),
        "tail": (["tail"], [ssh("0", hosts.tail(shared(), follow=True))]),
        "tail all": (["tail", "--worker=all"], [ssh("all", hosts.tail(shared(), follow=False))]),
        "delete": (["delete"], [describe, vm("delete", NAME, *SCOPE, "--quiet")]),
        "delete queued": (["delete", "--queued"], [queued("delete", NAME, *SCOPE, "--force", "--quiet")]),
    }  # fmt: skip


def expected(words, folder) -> list[str]:
    return [word.replace("OUT", str(folder)) for word in words]


def without_secrets(argvs) -> list[list[str]]:
    """The calls with the names of temporary files and folders replaced."""
    names = ((r"=/tmp\S*/torus-run-secret$", "=SECRET"), (r"/\.parts(-\w+)?/", "/PARTS/"))
    return [[functools.reduce(lambda w, name: re.sub(*name, w), names, word) for word in argv] for argv in argvs]


def run_all(gcloud: Recorder, entry: str, num_hosts: int, names=None) -> None:
    accel = ACCEL[num_hosts]
    for what, (words, calls) in lifecycle(accel, num_hosts).items():
        if names is None or what in names:
            done = gcloud.run(
                *expected(words, gcloud.folder), entry=entry, FAKE_HOSTS=str(num_hosts),
                NAME=NAME, ACCEL=accel, REPO_DIR=CODE, CKPT_OUT="models",
            )  # fmt: skip
            assert done.status == 0, (what, done.stderr)
            assert without_secrets(done.argvs) == [expected(call, gcloud.folder) for call in calls], what


@pytest.mark.parametrize("num_hosts", [1, 4, 8])
def test_every_subcommand_asks_exactly_this(gcloud, num_hosts):
    run_all(gcloud, POD, num_hosts)


@pytest.mark.parametrize("entry", [BASE, OPTIMIZED])
def test_both_script_names_ask_the_same(gcloud, entry):
    # They pass on every argument: a word, flags, the words after --, paths; all subcommands are dry-run in test_pod.py.
    run_all(gcloud, entry, 4, {"describe", "options", "ssh words", "backup"})


@pytest.mark.parametrize("entry", [BASE, OPTIMIZED])
def test_the_scripts_have_the_defaults_of_the_earlier_system(gcloud, entry):
    done = gcloud.run("backup", str(gcloud.folder / "backup_models"), entry=entry)
    assert without_secrets(done.argvs) == backup_of(4, f"{gcloud.folder}/backup_models")
    values = gcloud.run("help", entry=entry).stdout
    for line in ("SEQ_LEN 256", "STEPS 1200", "LR 0.0008", "BATCH_SIZE 128", "MODEL_SIZE medium", "DTYPE bf16"):
        name, value = line.split()
        assert any(name in words and value in words for words in map(str.split, values.splitlines())), line


def test_a_backup_is_not_mixed_with_that_of_a_later_pod_of_the_same_name(gcloud):
    folder = str(gcloud.folder / "backup")
    first, same, later = (gcloud.run("backup", folder, FAKE_HOSTS="1", FAKE_CREATED=f"2026-11-{day}T08:00:00Z")
                          for day in (1, 1, 2))  # fmt: skip
    assert (first.status, same.status, later.status) == (0, 0, 1)
    assert gcloud.run("backup", folder, "--dry-run", FAKE_HOSTS="1").status == 0, "it does not know the creation"
    assert "/backup is the backup of " in later.last_line and "created 2026-11-1T08:00:00Z; name" in later.last_line


def test_a_worker_that_is_none_gives_no_backup(gcloud):
    done = gcloud.run("backup", str(gcloud.folder / "backup"), "--coordinator_worker=4", CKPT_OUT="models")
    assert done.status == 2 and "COORDINATOR_WORKER=4: the workers are 0 to 3" in done.last_line


def test_a_pod_gets_a_new_secret_that_is_on_no_command_line_and_in_no_answer(gcloud):
    """The processes of its runs know each other by it."""
    made = [gcloud.run(*words.split()) for words in ("create", "create --queued", "create --dry-run")]
    found = [call["secret"] for done in made for call in done.calls]
    assert [done.status for done in made] == [0] * 3
    assert len({secret["text"] for secret in found}) == len(found) == 2
    for secret in found:
        assert re.fullmatch("[0-9a-f]{64}", secret["text"]) and secret["mode"] == "0o600"
        assert not pathlib.Path(secret["path"]).parent.exists()
        assert secret["text"] not in str([(done.argvs, done.stdout, done.stderr) for done in made])
    described = gcloud.run("describe", "--json", FAKE_METADATA=json.dumps({"torus-run-secret": "s", "mine": "m"}))
    assert json.loads(described.stdout)["metadata"] == {"mine": "m"}


def test_what_is_copied_from_all_workers_lies_apart(gcloud):
    done = gcloud.run("copy", f"{NAME}:/tmp/training.log", f"{gcloud.folder}/logs", NAME=NAME, FAKE_HOSTS="4")
    assert done.status == 0
    folders = [f"{gcloud.folder}/logs/worker-{i}/" for i in range(4)]
    scps = [vm("scp", f"{NAME}:/tmp/training.log", folder, *SCOPE, f"--worker={i}", "--recurse", *SCP)
            for i, folder in enumerate(folders)]  # fmt: skip
    assert done.argvs == [vm("describe", NAME, *SCOPE, "--format=json"), *scps]


def test_the_pod_of_a_copy_is_the_one_in_the_path(gcloud):
    source = str(ROOT / "pod.py")
    done = gcloud.run("copy", source, "node-1://remote/path/", "--zone=us-central2-b", "--worker=all")
    assert done.argvs == [vm("scp", source, "node-1:/remote/path/", *SCOPE, "--worker=all", *SCP)]


def test_workers_of_several_slices_are_counted_through(gcloud):
    done = gcloud.run("ssh", "--worker=1,5", "--queued", "--slices=2", "--", "true", FAKE_HOSTS="4")
    asked = [argv for argv in done.argvs if argv[3] == "ssh"]
    assert sorted(argv[4:5] + argv[7:8] for argv in asked) == [["torus-0", "--worker=1"], ["torus-1", "--worker=1"]]


WELL = {"state": "READY", "health": "HEALTHY"}
MAINTAINED = WELL | {"health": "UNHEALTHY_MAINTENANCE"}


@pytest.mark.parametrize(
    "worst, other",
    [({"state": "PREEMPTED"}, {"state": "REPAIRING"}), ({"state": "REPAIRING"}, MAINTAINED), (MAINTAINED, WELL),
     ({"state": "TERMINATED"}, WELL)],
)  # fmt: skip
def test_the_state_of_slices_is_that_of_the_worst(monkeypatch, worst, other):
    for nodes in ([other, worst, WELL], [worst, other, WELL]):
        pod = connect(shared("--queued", "--slices=3", ZONE="z", PROJECT="p"))
        monkeypatch.setattr(pod, "_describe", lambda node, nodes=nodes: nodes[int(node[-1])])
        assert worst.items() <= pod.found().items()


def test_a_run_on_several_slices_is_one_of_all_their_chips():
    given = shared("--queued", "--slices=2", ACCEL="v4-32")
    assert recipes.preset(given).chips == 32 and "--topology=2xv4-32" in recipes.arguments(given, {})


@pytest.mark.parametrize("num_hosts", [1, 4, 8])
def test_setup_brings_the_commit_and_the_secrets_but_no_secret_on_a_command_line(gcloud, num_hosts, monkeypatch):
    words = ["setup", "--repo_url=https://example.com/torus.git"]
    common = {"NAME": NAME, "ACCEL": ACCEL[num_hosts], "FAKE_HOSTS": str(num_hosts)}
    monkeypatch.setattr(deploy, "setup_optimizations", lambda settings, transport, rest: 0)  # tested by itself
    done = gcloud.run(*words, HF_TOKEN="hf_secret", **common)
    assert done.status == 0, done.stderr
    given = shared(*words[1:], REPO_DIR="~/torus")
    code, scp, protect, count = done.argvs
    assert code == ssh("all", hosts.setup(given, "https://example.com/torus.git", COMMIT))
    assert scp[:4] == vm("scp") and scp[5:] == [f"{NAME}:~/torus/.env", *SCOPE, "--worker=all", *SCP]
    assert (done.calls[1]["mode"], done.calls[1]["text"]) == ("0o600", "HF_TOKEN=hf_secret\n")
    assert not pathlib.Path(scp[4]).exists() and not pathlib.Path(scp[4]).parent.exists()
    assert protect == ssh("all", hosts.protect_secrets(given))
    assert count == ssh("all", hosts.count_devices(given))
    assert "hf_secret" not in json.dumps(done.argvs) + done.stdout + done.stderr


def test_a_repository_url_with_a_password_is_refused(gcloud):
    done = gcloud.run("setup", "--repo_url=https://me:secret@example.com/torus.git")
    assert (done.status, done.calls) == (2, [])
    assert "password" in done.last_line and "secret@" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [1, 8])
def test_launch_runs_on_every_host_until_it_is_stopped(gcloud, num_hosts, monkeypatch):
    """By the real shell commands, on folders that play the hosts."""
    monkeypatch.setattr(launch, "LOOK_AFTER_SECONDS", 0.5)
    codes = [gcloud.folder / f"worker-{i}" / "torus" for i in range(num_hosts)]
    for code in codes:
        code.mkdir(parents=True)
    common = {"FAKE_RUN": "1", "FAKE_HOSTS": str(num_hosts), "NAME": NAME, "ACCEL": ACCEL[num_hosts]}
    given = shared(REPO_DIR="~/torus")
    program = 'trap "exit 75" TERM; echo "token $HF_TOKEN of $FAKE_AGENT_WORKER_NUMBER"; while true; do sleep 0.1; done'
    each = [ssh(str(i), hosts.status_line(given)) for i in range(num_hosts)]
    start, stop = ssh("all", hosts.launch(given, ["bash", "-c", program])), ssh("all", hosts.stop(given))
    protect = ssh("all", hosts.protect_secrets(given))

    def asked(*words: str, **environment: str) -> tuple[list, str]:
        done = gcloud.run(*words, **common, **environment)
        assert done.status == 0, done.stderr
        assert "hf_secret" not in json.dumps(done.argvs) + done.stdout + done.stderr
        return [argv for argv in done.argvs if argv[3] == "ssh"], done.stdout

    calls, _ = asked("launch", "--", "bash", "-c", program, HF_TOKEN="hf_secret")
    assert sorted(calls) == sorted([*each, protect, start, *each]) and calls.index(start) == num_hosts + 1
    assert sorted(asked("status")[0]) == each
    pause = ssh("all", hosts.stop(given, for_good=False))
    assert sorted(asked("restart")[0]) == sorted([pause, *each, start, *each])
    calls, said = asked("stop")
    assert calls == [stop]
    for i, code in enumerate(codes):
        assert f"worker {i}: stopped, exit status 75" in said
        assert (code / f"logs/train_worker_{i}.out").read_text().count(f"token hf_secret of {i}") == 2
        assert (code / ".env").stat().st_mode & 0o777 == 0o600
    assert asked("stop")[1].count("nothing runs") == num_hosts


@pytest.mark.parametrize("num_hosts", [1, 4, 8])
@pytest.mark.parametrize(
    "name, log", [("launch_pretrain_hf", "train_worker"), ("launch_optimized", "train_optimized_worker")]
)
def test_trainings_are_launched_by_one_call_for_all_workers(gcloud, name, log, num_hosts):
    variables = {"NAME": NAME, "ACCEL": ACCEL[num_hosts], "MODEL_SIZE": "small", "SEQ_LEN": "256", "BUCKET": "b"}
    done = gcloud.run(name, "--dry-run", **variables)
    assert (done.status, done.calls) == (0, []), done.stderr
    given = shared(REPO_DIR="~/torus", **variables)
    chosen = recipes.data_keys(given)  # both train on the same data
    chosen |= recipes.resolved_switches(given).keys if name == "launch_optimized" else {}
    arguments = recipes.arguments(given, chosen, [], f"gs://b/runs/{NAME}/small")
    assert {"--config=configs/small.py", f"--topology={ACCEL[num_hosts]}"} < set(arguments)
    assert "--config.train.sequence_length=256" in arguments
    words = [".venv/bin/python", "train.py", *arguments]
    printed = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("gcloud")]
    assert printed[-1] == ["gcloud", *ssh("all", hosts.launch(given, words, log=log))]


@pytest.mark.parametrize("what", lifecycle("v4-32", 4))
def test_a_dry_run_makes_no_call_and_prints_what_would_be_called(gcloud, what):
    words, calls = lifecycle("v4-32", 4)[what]
    common = {"NAME": NAME, "REPO_DIR": CODE, "CKPT_OUT": "models", "PATH": "/nowhere"}
    done = gcloud.run(*words[:1], "--dry-run", *words[1:], **common)
    assert (done.status, done.calls) == (0, []), done.stderr
    script = "gcloud() { for word; do printf '%s\\0' \"$word\"; done; printf '\\n'; }\n" + done.stdout
    printed = subprocess.run(["bash", "-eu"], input=script, capture_output=True, text=True, check=True).stdout
    assert without_secrets(line.split("\0") for line in printed.split("\0\n") if line) == calls


FAILURES = [
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) UNAVAILABLE: 503 The service is unavailable.", 1, True),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) HTTPError 429: Too Many Requests", 1, True),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) INTERNAL: an internal error has occurred", 1, True),
    ("ERROR: gcloud crashed (ConnectionError): Connection reset by peer", 1, True),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied", 1, False),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) RESOURCE_EXHAUSTED: Quota limit 'TPUV4s' exceeded", 1, False),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource 'nodes/torus' was not found", 1, False),
    ("ERROR: (gcloud.compute.tpus.tpu-vm.describe) INVALID_ARGUMENT: no\nsuch\nthing", 2, False),
]  # fmt: skip


@pytest.mark.parametrize("stderr, status, passes", FAILURES)
def test_only_what_passes_is_tried_again_and_the_last_line_is_gclouds_own(gcloud, stderr, status, passes):
    failure = {"verb": "tpu-vm describe", "status": status, "stderr": stderr}
    done = gcloud.run("describe", FAKE_FAILURES=json.dumps([failure | {"times": 2}]))
    assert (done.status, len(done.calls)) == ((0, 3) if passes else (1, 3 - 2)), done.stderr
    assert ("; retry 1 of" in done.stderr) is passes
    for_ever = gcloud.run("describe", FAKE_FAILURES=json.dumps([failure]), RETRIES="2")
    assert (for_ever.status, len(for_ever.calls)) == (1, 3 if passes else 1)
    said = " ".join(stderr.partition("ERROR: ")[2].rpartition("describe) ")[2].split())
    assert for_ever.last_line == f"error: gcloud compute tpus tpu-vm describe: {said}"
    assert len(for_ever.stderr.splitlines()) == (3 if passes else 1)


def test_each_pause_before_a_retry_is_twice_as_long(monkeypatch):
    """So that a service that is overloaded is asked less and less."""
    pauses, given = [], settings.read(["--retries=4", "--retry_seconds=2"], {})[0]
    ending = types.SimpleNamespace(is_set=lambda: False, wait=lambda seconds: pauses.append(seconds))
    monkeypatch.setattr("pods.calls._ending", ending)
    monkeypatch.setattr("pods.calls._run", lambda argv, show, limit_s: Result(None, 1, "503 unavailable"))
    assert call(given, ["sh"]).status == 1
    assert len(pauses) == 4 and all(0.75 <= pause / (2 * 2**n) <= 1.25 for n, pause in enumerate(pauses))


def test_words_of_a_command_are_no_reason_to_run_it_again(gcloud):
    failure = {"verb": "tpu-vm ssh", "status": 3, "stderr": "503 internal error, Connection refused"}
    done = gcloud.run("ssh", "--worker=0", "--", "train", FAKE_FAILURES=json.dumps([failure]))
    assert (done.status, len(done.calls)) == (3, 1)
    assert "exit status 3" in done.last_line and "503 internal error" in done.stderr


def test_the_patterns_exclude_each_other_where_it_matters():
    for text in ("Quota exceeded for quota metric 'Read requests' per minute", "DEADLINE_EXCEEDED", "504"):
        assert TRANSIENT.search(text) and not PERMANENT.search(text), text
    for text in ("There is no more capacity in the zone", "ALREADY_EXISTS", "403 Forbidden"):
        assert PERMANENT.search(text), text


def test_create_and_delete_again_say_so_and_succeed(gcloud):
    exists = "ERROR: (gcloud.compute.tpus.tpu-vm.create) ALREADY_EXISTS: Requested entity already exists"
    failure = {"verb": "tpu-vm create", "status": 1, "stderr": exists}
    done = gcloud.run("create", FAKE_FAILURES=json.dumps([failure]), ACCEL="v4-8")
    assert done.status == 0 and "torus exists already" in done.stdout
    assert "READY, HEALTHY, v4-32, 4 workers" in done.stdout and "warning: the existing pod is a v4-32" in done.stdout
    for words in (["delete"], ["delete", "--queued"]):
        done = gcloud.run(*words, FAKE_HOSTS="0")
        assert done.status == 0 and "does not exist; nothing to delete" in done.stdout, done.stderr


def test_a_pod_is_only_created_if_its_flags_can_be_kept(gcloud, tmp_path):
    (tmp_path / "file").touch()
    done = gcloud.run("create", POD_ROOT=str(tmp_path / "file"))
    assert done.status == 2 and "Not a directory; name a folder that can be written" in done.stderr
    assert not done.argvs, "no call was made"


def test_a_folder_of_a_run_may_be_a_word_of_its_own(gcloud):
    words = ["launch_pretrain_hf", "--dry_run", "--", "--workdir", "gs://b/x"]
    one, two = (gcloud.run(*words[:3], *given, ACCEL="v4-32") for given in (["--workdir=gs://b/x"], words[3:]))
    assert one.status == 0 and one.stdout == two.stdout and "gs://b/x" in one.stdout
    words = ["--evaluate_only", "--topology", "v4-32", "-workdir=x", "--config.optimizer.end", "-1", "--workdir", "y"]
    assert launch._with_one_word(words) == [
        "--evaluate_only", "--topology=v4-32", "-workdir=x", "--config.optimizer.end=-1", "--workdir=y",
    ]  # fmt: skip


def test_delete_takes_the_queued_resource_with_the_node(gcloud):
    done = gcloud.run("delete", FAKE_REQUEST="my-request")
    assert done.argvs[-1] == queued("delete", "my-request", *SCOPE, "--force", "--quiet")


def test_delete_takes_the_request_of_a_queued_pod_that_is_not_there_yet(gcloud):
    """Else the pod arrives later, and nobody watches it."""
    assert gcloud.run("create", "--queued", "--queued_resource=q", ACCEL="v4-16").status == 0
    done = gcloud.run("delete", FAKE_HOSTS="0")
    assert done.status == 0 and done.argvs[-1] == queued("delete", "q", *SCOPE, "--force", "--quiet")


def test_wait_follows_the_request_until_it_is_active(gcloud):
    states = "WAITING_FOR_RESOURCES ACCEPTED PROVISIONING PROVISIONING ACTIVE"
    done = gcloud.run("wait", "--queued", FAKE_STATES=states)
    assert done.status == 0 and len(done.calls) == 5
    assert [line.split()[2].rstrip(";") for line in done.stdout.splitlines()] == [
        "WAITING_FOR_RESOURCES", "ACCEPTED", "PROVISIONING", "ACTIVE"]  # fmt: skip


@pytest.mark.parametrize("state", ["SUSPENDING", "SUSPENDED", "FAILED"])
def test_wait_ends_where_the_pod_will_not_come(gcloud, state):
    done = gcloud.run("wait", "--queued", FAKE_STATES=f"PROVISIONING {state}")
    assert done.status == 1 and f"is {state}" in done.last_line and "delete --queued" in done.last_line
    node = gcloud.run("wait", FAKE_NODE_STATE="PREEMPTED")
    assert node.status == 1 and "is PREEMPTED" in node.last_line


def test_wait_has_an_end(gcloud):
    done = gcloud.run("wait", "--queued", "--wait_seconds=0.05", FAKE_STATES="WAITING_FOR_RESOURCES")
    assert done.status == 1 and "still WAITING_FOR_RESOURCES" in done.last_line


@pytest.mark.parametrize(
    "words", [["describe"], ["wait"], ["ssh", "--worker=0", "--", "ls"], ["copy", "torus:/a", "b"]]
)
def test_a_pod_that_does_not_exist_is_told_in_gclouds_words(gcloud, words):
    done = gcloud.run(*words, FAKE_HOSTS="0")
    assert done.status == 1
    assert "NOT_FOUND: Resource 'projects/p/locations/z/nodes/torus' was not found" in done.stderr


def test_the_output_of_ssh_is_displayed_and_its_status_decides(gcloud):
    done = gcloud.run("ssh", "--", "nvtop", FAKE_SSH_STATUS="7", FAKE_SSH_OUTPUT="all is well")
    assert (done.status, done.stdout) == (7, "all is well\n")
    assert done.last_line == "error: ssh to torus, worker all: exit status 7"


@pytest.mark.parametrize(
    "words", ["ssh --zones=a", "create --preemptable", "describe --worker=0", "ssh --worker", "ssh --worker=worker-1"]
)
def test_the_table_of_flags_refuses_what_gcloud_would(words):
    verb, *more = words.split()
    with pytest.raises(AssertionError):
        check_flags(vm(verb, "torus", *more))


@pytest.mark.parametrize("worker", ["worker-0", "all,1", "", "0-", "-1", "0;ls", "1-2-3"])
def test_workers_are_numbers(worker):
    with pytest.raises(PodError, match="--worker"):
        check_worker(worker)


def test_workers_are_selected():
    assert (
        worker_numbers("all", 3) == [0, 1, 2]
        and worker_numbers("2", 3) == [2]
        and worker_numbers("0-1,3", 4) == [0, 1, 3]
    )
    with pytest.raises(PodError, match="workers 0 to 3"):
        worker_numbers("4", 4)
    with pytest.raises(PodError, match=r"--worker=3-1: the pod has workers 0 to 3, in ascending ranges$"):
        worker_numbers("3-1", 4)


def test_the_group_is_named_only_where_it_was_asked_for():
    found = {"networkEndpoints": [{"ipAddress": f"10.0.0.{i}"} for i in range(4)], "workers": 4}
    pod = types.SimpleNamespace(found=lambda: found)
    assert life.group_variables(shared(), pod) == life.group_variables(shared("--coordinator_worker=1"), pod) == {}
    named = {"JAX_COORDINATOR_ADDRESS": "10.0.0.0:8476", "JAX_PROCESS_COUNT": "4", "JAX_PROCESS_INDEX": "$W"}
    assert life.group_variables(shared("--port=8476", "--coordinator_worker=1"), pod) == named
    summary = life._summary(shared("--coordinator_worker=1"), pod.found())
    assert re.findall(r"worker (\d): \S+ .coordinator", summary) == ["0"], "process 0 opens the ports"
    found["workers"] = 8  # a second slice has no hosts yet
    with pytest.raises(PodError, match=f"only 4 hosts of {NAME} so far; `wait` for it and try again"):
        life.group_variables(shared("--port=8476"), pod)


def test_a_pod_that_lacks_hosts_is_not_stopped_by_a_restart(monkeypatch):
    pod = types.SimpleNamespace(found=lambda: {"networkEndpoints": [{"ipAddress": "10.0.0.0"}], "workers": 8})
    pod.run = lambda *words: pytest.fail("something was stopped")
    monkeypatch.setattr(launch.records, "read", lambda settings: {})
    with pytest.raises(PodError, match="only 1 host of "):
        launch.restart(shared("--port=8476"), pod, [])


def test_output_is_displayed_as_it_comes_and_ctrl_c_is_one_line(gcloud):
    variables = gcloud.environment | {"FAKE_RUN": "1"}
    words = [sys.executable, str(ROOT / POD), "ssh", "--worker=0", "--", "echo first; exec sleep 5"]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        said = process.stderr.readlines()  # the rest of the output of ssh is not awaited
        assert said[-1] == "interrupted; launched programs keep running\n" and len(said) <= 2


@pytest.mark.parametrize("slices", ["1", "2"])
def test_output_that_nobody_reads_any_more_ends_a_command_in_one_line(gcloud, slices):
    """As in `pod.py tail | head`."""
    variables = gcloud.environment | {"FAKE_RUN": "1", "SLICES": slices, "QUEUED": "1"}
    words = [sys.executable, str(ROOT / POD), "ssh", "--", "while echo line; do sleep 0.1; done"]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read().endswith("error: the program that reads this output has closed it\n")
        assert process.wait(timeout=20) == 1


def test_ctrl_c_ends_a_command_on_several_slices(gcloud):
    """Each slice has a call of its own, in a thread that gets no signal."""
    variables = gcloud.environment | {"FAKE_RUN": "1"}
    ssh = ["ssh", "--queued", "--slices=2", "--worker=0,2", "--", "echo first; exec sleep 30"]
    words = [sys.executable, str(ROOT / POD), *ssh]
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["first\n", "first\n"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130
        assert process.stderr.readlines()[-1] == "interrupted; launched programs keep running\n"


@pytest.mark.parametrize("path", ["~/a$(touch x)", "~/a`touch x`", "/a;touch x", "/a'b", "/a\nb"])
def test_a_path_that_scp_would_pass_to_a_shell_is_refused(gcloud, path):
    """With an old scp a shell on the host expands it."""
    done = gcloud.run("copy", "LICENSE", f"torus:{path}")
    assert done.status == 2 and "scp may pass this path to a shell on the host" in done.last_line
    assert not any("scp" in argv for argv in done.argvs)
