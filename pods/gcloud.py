# SPDX-License-Identifier: Apache-2.0
"""A pod of TPU VMs, by the commands of gcloud: https://cloud.google.com/sdk/gcloud/reference/compute/tpus

With several slices the pod is a queued resource with the nodes NAME-0, NAME-1, ..., and workers are counted through.
"""

import functools
import json
import pathlib
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from configs import topologies
from pods import hosts, recipes
from pods.calls import Answer, call
from pods.settings import ROOT, Settings
from pods.transports import PodError, Result, check_worker, selected, usage_error

NOT_FOUND = re.compile(r"not[_ ](?:be )?found", re.IGNORECASE)
EXISTS = re.compile(r"already[_ ]exists?", re.IGNORECASE)
QUEUED_AND_LOST = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")  # such a request never becomes active
NODE_AND_LOST = ("PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING", "HIDDEN", "HIDING")


class Gcloud:
    """The transport `gcloud`.

    Raises:
      PodError: from every method, with gcloud's own message in one line; status 2 without a zone or a project.
    """

    def __init__(self, settings: Settings):
        for name in ("zone", "project"):
            if not getattr(settings, name):
                raise usage_error(f"{name.upper()} is not set: export {name.upper()}=... or give --{name}=...")
        self.settings = settings
        self.scope = [f"--zone={settings.zone}", f"--project={settings.project}"]
        prefix = settings.name
        self.nodes = [f"{prefix}-{i}" for i in range(settings.slices)] if settings.slices > 1 else [prefix]

    @functools.cached_property
    def num_workers(self) -> int:
        """Hosts of the pod that is there; in a dry run those of its type."""
        workers = self.found()["workers"]
        if not workers:
            raise PodError(f"{self.settings.name} has no hosts yet; `wait` for it")
        return workers

    @property
    def record_path(self) -> pathlib.Path:
        """Where the launching side keeps what it launched."""
        return self.settings.pod_folder / "launch.json"

    def versions(self) -> None:
        """Display the software and the types of accelerators that the zone has."""
        for kind in ("versions", "accelerator-types"):
            self._checked(["tpu-vm", kind, "list", *self.scope], show=True)

    def create(self) -> str:
        """Ask for the pod, by a queued resource where told so."""
        settings = self.settings
        if not settings.version:
            raise usage_error("VERSION is empty; `versions` lists them")
        if settings.queued:
            nodes = ["--node-id=" + settings.name]
            if settings.slices > 1:
                nodes = [f"--node-count={settings.slices}", f"--node-prefix={settings.name}"]
            software = f"--runtime-version={settings.version}"
            words = [
                "queued-resources",
                "create",
                settings.request,
                *nodes,
                *self.scope,
                *self._accelerator(),
                software,
            ]
            words += self._options("valid_until_duration")
        else:
            software = f"--version={settings.version}"
            words = ["tpu-vm", "create", settings.name, *self.scope, *self._accelerator(), software, *self._options()]
        answer = self._gcloud(words)
        if EXISTS.search(answer.message) and answer.status:
            return f"{settings.name} exists already"
        self._check(words, answer)
        asked = f"request {settings.request} is queued; `wait` for it" if settings.queued else "created"
        return f"{settings.name}: {asked}"

    def wait(self) -> str:
        """Return when the pod is there; PodError where it never will be, or not within wait_seconds."""
        end, said = time.monotonic() + self.settings.wait_seconds, ""
        while True:
            state, lost = self._state()
            if state in ("ACTIVE", "READY"):
                return f"{self.settings.name} is {state}"
            if state in lost:
                flag = " --queued" if self.settings.queued else ""
                raise PodError(
                    f"{self.settings.name} is {state} and will not come; `delete{flag}` it, then create anew"
                )
            if time.monotonic() > end:
                raise PodError(f"{self.settings.name} is still {state} after {self.settings.wait_seconds:.0f} s")
            if state != said:
                print(f"{self.settings.name} is {state}; waiting", flush=True)
                said = state
            time.sleep(self.settings.poll_seconds)

    def describe(self) -> dict | None:
        """Return what gcloud says of the pod, with the number of its workers; None where there is none."""
        try:
            return self.found()
        except _Missing:
            return None

    def found(self) -> dict:
        """Return the same; PodError, in gcloud's words, where there is no such pod."""
        if self.settings.dry_run:
            return self._imagined()
        nodes = [self._describe_node(node) for node in self.nodes]
        slowest = next((node for node in nodes if node.get("state") != "READY"), nodes[0])
        endpoints = [endpoint for node in nodes for endpoint in node.get("networkEndpoints", [])]
        return slowest | {"networkEndpoints": endpoints, "workers": len(endpoints)}

    def delete(self) -> str:
        """Give the pod back, with the queued resource that it came from."""
        settings = self.settings
        request = settings.request if settings.queued else self._request_of_node()
        if request is None:
            return f"{settings.name} does not exist; nothing to delete (a request still waiting: --queued)"
        if request:
            words = ["queued-resources", "delete", request, *self.scope, "--force", "--quiet"]
        else:
            words = ["tpu-vm", "delete", settings.name, *self.scope, "--quiet"]
        answer = self._gcloud(words)
        if answer.status and NOT_FOUND.search(answer.message):
            return f"{request or settings.name} does not exist; nothing to delete"
        self._check(words, answer)
        return f"{settings.name}: deleted"

    def put_code(self) -> None:
        """Clone or fetch the present commit on every host and install its packages; refuses a URL with a password."""
        settings = self.settings
        url = settings.repo_url or _git("remote", "get-url", "origin")
        if not url:
            raise usage_error(
                "REPO_URL is not set, and this clone has no origin: from where do the hosts get the code?"
            )
        if re.match(r"https?://[^/]*@", url):
            raise usage_error("REPO_URL has a password in it, which everybody on the hosts could read; leave it out")
        commit = _git("rev-parse", "HEAD")
        if not commit:
            raise usage_error(f"git does not tell the commit of {ROOT}, which the hosts are to get")
        if _git("status", "--porcelain"):
            line = "warning: there are uncommitted changes here, and the hosts get the commit without them"
            print(f"# {line}" if settings.dry_run else line, flush=True)
        self._remote(hosts.setup(settings, url, commit), "set up")

    def run(self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "") -> list[Result]:
        """Run a shell command by one ssh call a node; what a worker says is displayed as it comes."""
        extra = [f"--output-directory={output_directory}"] if output_directory else []

        def ssh(target: tuple[str, str, int]) -> Result:
            node, chosen, first = target
            words = ["tpu-vm", "ssh", node, *self.scope, f"--worker={chosen}", f"--command={command}", *extra]
            # gcloud itself tries ten times to reach each worker; of several, some may have run the command.
            answer = self._gcloud(words, show=show, remote=True, repeat=chosen.isdigit())
            worker = first + int(chosen) if chosen.isdigit() else None
            return _result(worker, answer)

        return self._side_by_side(ssh, self._targets(worker))

    def run_each(self, command: str) -> list[Result]:
        """Run it on every worker by a call of its own."""
        return self._side_by_side(lambda i: self.run(command, worker=str(i), show=False)[0], range(self.num_workers))

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> Result:
        """Copy by scp; the path of a worker is written NAME:PATH. From a worker, `worker` is one number."""
        results = []
        for node, chosen, _ in self._targets(worker):
            pair = [re.sub(f"^{self.settings.name}:", f"{node}:", text) for text in (source, target)]
            words = ["tpu-vm", "scp", *pair, *self.scope, f"--worker={chosen}", *(["--recurse"] if recurse else [])]
            answer = self._gcloud(words, remote=True)
            results.append(_result(None, answer))
            if answer.status:
                raise PodError(f"gcloud compute tpus tpu-vm scp: {answer.message}")
        return results[-1]

    def _describe_node(self, node: str) -> dict:
        words = ["tpu-vm", "describe", node, *self.scope, "--format=json"]
        answer = self._gcloud(words)
        if answer.status and NOT_FOUND.search(answer.message):
            raise _Missing(f"gcloud compute tpus tpu-vm describe: {answer.message}")
        text = self._check(words, answer).stdout
        try:
            described = json.loads(text)
        except ValueError:
            described = None
        if not isinstance(described, dict):
            raise PodError(f"gcloud compute tpus tpu-vm describe: answered no JSON object: {text[:100]!r}")
        return described

    def _imagined(self) -> dict:
        """Print what would be asked, and go on as if every host were there."""
        for node in self.nodes:
            self._gcloud(["tpu-vm", "describe", node, *self.scope, "--format=json"])
        name = recipes.slice_name(self.settings)
        workers = self.settings.slices * (topologies.get(name).hosts if name else 1)
        print(f"# dry run: taken to be READY with {workers} workers", flush=True)
        endpoints = [{"ipAddress": f"10.0.0.{i + 2}"} for i in range(workers)]
        described = {"state": "READY", "health": "HEALTHY", "acceleratorType": self.settings.accel}
        return described | {"networkEndpoints": endpoints, "workers": workers}

    def _request_of_node(self) -> str | None:
        """Return the queued resource that the node came from, "" without one; None where there is no such node."""
        try:
            pod = self.found()
        except _Missing:
            return None
        return pod.get("queuedResource", "").rpartition("/")[2]

    def _state(self) -> tuple[str, tuple[str, ...]]:
        """Return the state of the request or the pod, and those from which it never becomes usable."""
        if not self.settings.queued:
            return self.found().get("state", "UNKNOWN"), NODE_AND_LOST
        words = ["queued-resources", "describe", self.settings.request, *self.scope, "--format=value(state.state)"]
        state = self._checked(words).stdout.strip()
        return "ACTIVE" if self.settings.dry_run else state, QUEUED_AND_LOST

    def _accelerator(self) -> list[str]:
        settings = self.settings
        if settings.type:
            return [f"--type={settings.type}", f"--topology={settings.topology}"]
        google = {ours: theirs for theirs, ours in recipes.GOOGLE_NAMES.items()}
        family, size = re.fullmatch(r"(.*-)?(.*)", settings.accel).groups(default="")
        return [f"--accelerator-type={google.get(family, family)}{size}"]

    def _options(self, *more: str) -> list[str]:
        """Return the flags of a creation that are set."""
        names = ["spot", "reserved", "network", "subnetwork", "internal_ips", "service_account", "scopes", "labels",
                 "metadata", "data_disk", *more]  # fmt: skip
        words = []
        for name in names:
            value, flag = getattr(self.settings, name), "--" + name.replace("_", "-")
            words += [flag] if value is True else [f"{flag}={value}"] if value else []
        return words

    def _targets(self, worker: str) -> list[tuple[str, str, int]]:
        """Return (node, its workers as gcloud takes them, number of its first worker) for what --worker names."""
        check_worker(worker)
        if len(self.nodes) == 1 or worker == "all":
            return [(node, worker, 0) for node in self.nodes]
        size = self.num_workers // len(self.nodes)
        chosen = [divmod(number, size) for number in selected(worker, self.num_workers)]
        return [(self.nodes[node], str(index), node * size) for node, index in chosen]

    def _remote(self, command: str, what: str) -> None:
        """Run a command on all hosts and display it; PodError where it failed on one."""
        status = max(result.status for result in self.run(command))
        if status:
            raise PodError(f"{self.settings.name}: a host could not be {what} (exit status {status}); see above")

    def _side_by_side(self, function, targets) -> list[Result]:
        """Return what `function` makes of each target, all at once; in a dry run in order."""
        targets = list(targets)
        if len(targets) == 1:  # in this thread, which Ctrl-C reaches
            return [function(targets[0])]
        with ThreadPoolExecutor(max_workers=1 if self.settings.dry_run else min(32, len(targets))) as pool:
            return list(pool.map(function, targets))

    def _gcloud(self, words: list[str], **options) -> Answer:
        return call(self.settings, ["gcloud", "compute", "tpus", *words], **options)

    def _checked(self, words: list[str], **options) -> Answer:
        return self._check(words, self._gcloud(words, **options))

    def _check(self, words: list[str], answer: Answer) -> Answer:
        """Raise gcloud's own message where the call failed."""
        if answer.status:
            verb = " ".join(words[: 3 if words[2] == "list" else 2])
            raise PodError(f"gcloud compute tpus {verb}: {answer.message}")
        return answer


class _Missing(PodError):
    """There is no such node."""


def storage(settings: Settings, words: list[str], *, show: bool = False) -> Result:
    """Call `gcloud storage` with these words, as ["ls", "gs://bucket"]; the status decides."""
    answer = call(settings, ["gcloud", "storage", *words], show=show)
    return _result(None, answer)


def _result(worker: int | None, answer: Answer) -> Result:
    """Return what was said; of stderr, where gcloud tells its progress too, only that of a failure."""
    return Result(worker, answer.status, answer.stdout + (answer.stderr if answer.status else ""))


def _git(*words: str) -> str:
    """Return what git says of the code here; "" where it fails."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def quoted(words: list[str]) -> str:
    """Return what is to run on a host: one word is text for its shell, several are a program and its arguments."""
    return words[0] if len(words) == 1 else shlex.join(words)
