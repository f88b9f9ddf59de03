# SPDX-License-Identifier: Apache-2.0
"""The shell commands that run on the hosts, through ssh or on this machine. They keep files in the code's folder:

    run.pid      the process group of the launch; `stop` removes it
    run.command  the launched command, to recognize a second launch of the same
    run.status   the exit status (75: saved)
    run.stopped  exists if `pod.py stop` was called since the launch
    run.boot     the boot id of the launch, because process ids are reused after a reboot
    run.kept/    the files of the last launch, kept here while an `attached` call runs with files of its own
    run.lock     held during a launch, and while `stop` looks for what to stop
    logs/        train_worker_I.out or train_optimized_worker_I.out, appended to
    .env         secrets, mode 600, sourced at a launch

Each function returns one line of text for a POSIX shell in the host's home folder; its exit status decides.
"""

import shlex
from collections.abc import Mapping, Sequence

from checkpointing.bucket import copy_name
from pods.settings import Settings

METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number"
ENV_FILE = ".env"
KILL_SECONDS = 5  # that a killed program may take to end
SAVED = 75  # exit status of a program that was stopped and saved
FINAL = (2, 3)  # exit statuses that a restart would repeat: configuration, loss not finite
OURS = (  # files that git ignores on a host
    "logs/", "run.*", "studies.db*", ENV_FILE, ".venv", "optimization_deployment_report.json",
    "configs/optimization_config.json",
)  # fmt: skip
# For programs that run on a host during a training: they use no device, and have low priority.
IN_BACKGROUND = ("env", "JAX_PLATFORMS=cpu", "nice", "-n", "19")
FIRST_WORKER = "POD_FIRST_WORKER"  # variable with the number of a slice's first worker; the hosts count from 0 in each
WORKER_NUMBER = "$W"  # a variable with this value gets the number of each worker
# An ssh shell on a TPU VM has no TPU_WORKER_ID.
WORKER = (
    f"W=${{POD_WORKER:-$(curl -sf --max-time 10 -H 'Metadata-Flavor: Google' {METADATA} | head -c 9)}}; "
    'case "$W" in ""|*[!0-9]*) echo "the metadata server did not return the number of this worker" >&2; exit 1;; esac; '
    f"W=$((W + ${{{FIRST_WORKER}:-0}}))"
)
# kill -0 would count a zombie as alive.
ALIVE = (
    "boot() { cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo unknown; }; "
    'alive() { [ -s run.pid ] && [ "$(cat run.boot 2>/dev/null)" = "$(boot)" ] && ps -A -o pgid=,stat= | '
    "awk -v p=\"$(cat run.pid 2>/dev/null)\" '$1 == p && $2 !~ /^Z/ { found = 1 } END { exit !found }'; }; "
    'is_attached() { [ "$(cat run.command 2>/dev/null)" = attached ]; }'
)
LOCK = "flock -w 60 9 2>/dev/null"  # no lock where flock is missing, or if .env takes more than 60 s
# The program handles TERM and saves; the shell around it survives TERM and records the exit status.
WRAPPER = 'trap : TERM INT HUP; "$@"; status=$?; echo $status > run.status; exit $status'
PYTHONS = "python3.13 python3.12 python3.11 python3"
SUITABLE = "import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))"


def say(text: str) -> str:
    """Print a line about this worker; `text` is quoted, so that it is never a command."""
    return f'echo "worker $W:" {shlex.quote(text)}'


def fail(text: str) -> str:
    """Print a line about this worker on stderr and end with status 1; `text` is quoted."""
    return f"{say(text)} >&2; exit 1"


def path(text: str) -> str:
    """Quote a path of a host; ~/ stays the home folder there."""
    return "~/" + shlex.quote(text.removeprefix("~/")) if text.startswith("~/") else shlex.quote(text)


def in_code(settings: Settings, command: str) -> str:
    """Return `command` in the folder of the code, with $W the number of the worker."""
    missing = fail(f"there is no {settings.repo_dir} here; `pod.py setup` creates it")
    return f"{WORKER}; cd {path(settings.repo_dir)} 2>/dev/null || {{ {missing}; }}; {command}"


def python(settings: Settings) -> str:
    """Return the interpreter of a host, from the folder of the code."""
    return "python" if settings.venv_activate else ".venv/bin/python"


def in_environment(settings: Settings, command: str) -> str:
    """Return `command` in the folder of the code and in the environment of its packages."""
    # With && only the first of several commands would depend on it.
    activate = f". {path(settings.venv_activate)} || exit 1; " if settings.venv_activate else ""
    return in_code(settings, activate + command)


def log_name(prefix: str) -> str:
    """Return the path of a worker's log for a shell; the prefix is train_worker or train_optimized_worker."""
    return f'logs/{shlex.quote(prefix)}_"$W".out'


def launch(
    settings: Settings, words: Sequence[str], *, environment: Mapping[str, str] | None = None,
    log: str = "train_worker", unless_stopped: bool = False,
) -> str:  # fmt: skip
    """Start a program that survives the terminal, and return immediately.

    If the same program already runs, the command prints so and succeeds; if another program runs, it fails. A lock
    guards against concurrent launches.

    Args:
      words: the program and its arguments.
      environment: additional variables, whose value may be WORKER_NUMBER. Secrets belong in .env instead.
      log: prefix of its log's name.
      unless_stopped: whether to fail if `pod.py stop` was called since the last launch.
    """
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    program = shlex.join(["env", *variables, *words] if variables else words)
    for name, value in (environment or {}).items():
        if value == WORKER_NUMBER:
            program = program.replace(shlex.quote(f"{name}={value}"), f'{shlex.quote(name)}="$W"', 1)
    fingerprint = shlex.quote(shlex.join([*variables, *words]))
    output = log_name(log)
    unwritable = f"{{ {fail('cannot write to the folder of the code; is the disk full?')}; }}"
    start = (
        f"mkdir -p logs && rm -f run.status run.stopped && boot > run.boot && "
        f"printf '%s\\n' {fingerprint} > run.command && "
        f'echo "== $(date -u +%FT%TZ) $(cat run.command)" >> {output} || {unwritable}; '
        f"if [ -f {ENV_FILE} ]; then chmod 600 {ENV_FILE}; set -a; . ./{ENV_FILE}; set +a; fi; "
        f"setsid nohup sh -c {shlex.quote(WRAPPER)} torus-run {program} >> {output} 2>&1 < /dev/null 9>&- & "
        f'echo $! > run.pid && echo "worker $W: launched, process group $(cat run.pid), log" {output}'
    )
    same = f'[ "$(cat run.command)" = {fingerprint} ]'
    running = (
        f'if {same}; then echo "worker $W: runs already, process group $(cat run.pid)"; '
        'else echo "worker $W: another program runs, process group $(cat run.pid); stop it first" >&2; exit 1; fi'
    )
    refused = f"if [ -e run.stopped ]; then {fail('the run was stopped by `stop`')}; fi; " if unless_stopped else ""
    one_at_a_time = f"{{ {LOCK}; if alive; then {running}; else {refused}{start}; fi; }} 9> run.lock || {unwritable}"
    return in_environment(settings, f"{ALIVE}; {one_at_a_time}")


def attached(command: str) -> str:
    """Return `command` for a call that waits for it; meanwhile it has a run.pid, so that `stop` ends it like a launch.

    Afterwards the files of the last launch are put back. A killed command leaves them in run.kept, and the next one
    puts them back. The end of the call does not end the command: without a terminal, a lost connection sends no SIGHUP.
    """
    busy = fail("another program runs; stop it first")
    files = "run.pid run.boot run.command"
    keep = f"is_attached || {{ rm -rf run.kept; mkdir run.kept; mv {files} run.kept 2>/dev/null; }}"
    own = "boot > run.boot; echo attached > run.command; echo $$ > run.pid"
    begin = f"{{ {LOCK}; if alive; then {busy}; fi; {keep}; {own}; }}"
    back = f"rm -f {files}; mv run.kept/* . 2>/dev/null; rmdir run.kept 2>/dev/null"
    end = f's=$?; {{ {LOCK}; if [ "$(cat run.pid 2>/dev/null)" = $$ ]; then {back}; fi; }} 9> run.lock; exit $s'
    return f"{ALIVE}; {begin} 9> run.lock; trap : TERM PIPE; {command}; {end}"  # sshd gives each shell a process group


def stop(settings: Settings, *, for_good: bool = True) -> str:
    """Stop the launched program: TERM, time to save, then KILL; if nothing runs, print so and succeed.

    Each worker prints what was done. The status is 1 if a program had to be killed and so did not save. A stop
    `for_good` creates run.stopped, so that `supervise` does not start the program again.
    """
    grace = settings.grace_seconds
    mark = "touch run.stopped; " if for_good else ""
    look = f"look() {{ {mark}if alive; then P=$(cat run.pid); is_attached; A=$?; else rm -f run.pid; fi; }}"
    # Without the lock, a launch at the same time would lose its run.pid. A full disk may refuse the lock.
    locked = f"P=; {{ {LOCK}; look; }} 9> run.lock || look"
    mine = 'named() { [ "$(cat run.pid 2>/dev/null)" = "$P" ]; }; mine() { named && alive; }'  # a launch may follow
    forget = f"{{ {LOCK}; if named; then rm -f run.pid; fi; }} 9> run.lock"
    until_ended = "i=0; while mine && [ $i -lt {} ]; do sleep 0.2; i=$((i+1)); done"
    end = (
        f'{mine}; kill -s TERM -- "-$P" 2>/dev/null; {until_ended.format(5 * grace)}; '
        # A killed program that still holds the chips would end the next one.
        f'if mine; then kill -s KILL -- "-$P"; {until_ended.format(5 * KILL_SECONDS)}; {forget}; '
        f'echo "worker $W: did not end within {grace} s and was killed" >&2; exit 1; '
        f"else {forget}; code() {{ cat run.status 2>/dev/null || echo unknown; }}; "
        'echo "worker $W: stopped$([ $A = 0 ] || echo ", exit status $(code)")"; fi'
    )
    absent = f"cd {path(settings.repo_dir)} 2>/dev/null || {{ {say('nothing runs')}; exit 0; }}"
    return f'{WORKER}; {absent}; {ALIVE}; {look}; {locked}; if [ -n "$P" ]; then {end}; else {say("nothing runs")}; fi'


def status_line(settings: Settings, heartbeat: str = "") -> str:
    """Print the state of the worker as a JSON object; pods/answers.py: Answer is its schema.

    `now` and `started` (the launch) are Unix seconds of the host's clock; `changed` counts git's changed files.

    Args:
      heartbeat: path of this worker's heartbeat file (a JSON object), with $W for its number; the host expands ~ and
        globs. The field is null if there is no such file.
    """
    beat = f'"$(cat {heartbeat} 2>/dev/null | grep . || echo null)"' if heartbeat else "null"
    fields = (
        ("alive", "%s", '"$(alive && echo true || echo false)"'),
        ("pid", "%s", '"$(cat $K/run.pid 2>/dev/null | grep . || echo null)"'),
        ("status", "%s", '"$({ { is_attached && alive; } || cat run.status 2>/dev/null; } | grep . || echo null)"'),
        ("stopped", "%s", '"$([ -e run.stopped ] && echo true || echo false)"'),
        ("now", "%s", '"$(date +%s)"'),
        ("started", "%s", '"$(date -r $K/run.pid +%s 2>/dev/null || echo null)"'),
        ("commit", '"%s"', '"$(git rev-parse --verify -q HEAD 2>/dev/null)"'),
        ("changed", "%s", "\"$(git status --porcelain 2>/dev/null | wc -l | tr -d ' ')\""),
        ("rss_gib", "%s", '"$(memory)"'),
        ("heartbeat", "%s", beat),
    )
    form = "{" + ", ".join(f'"{name}": {kind}' for name, kind, _ in fields) + "}\\n"
    memory = (
        'memory() { ps -A -o pgid=,rss= | awk -v p="$(cat run.pid 2>/dev/null)" '
        "'$1 == p { k += $2 } END { printf \"%.2f\", k / 1048576 }'; }"
    )
    values = " ".join(value for *_, value in fields)
    known = "K=.; if is_attached && ! alive; then K=run.kept; fi"  # a killed `attached` does not hide the last launch
    return in_code(settings, f"{ALIVE}; {memory}; {known}; printf {shlex.quote(form)} {values}")


def tail(settings: Settings, *, follow: bool) -> str:
    """Print the end of the newest log; with `follow`, continue as it grows."""
    flag = " -F" if follow else ""
    newest = "$(ls -t logs/*_$W.out 2>/dev/null | head -n 1)"
    return in_code(
        settings,
        f'l="{newest}"; [ -n "$l" ] || {{ {fail("there is no log yet")}; }}; tail -n {settings.lines}{flag} "$l"',
    )


def here(workdir: str) -> str:
    """Return a run's folder for the shell of a host; for a run in a bucket, the host's copy of its small files."""
    if "://" not in workdir:
        return path(workdir)
    return f"${{XDG_CACHE_HOME:-$HOME/.cache}}/torus/workdirs/{shlex.quote(copy_name(workdir))}"


def read_command(settings: Settings, workdir: str, name: str) -> str:
    """Return a command that prints a file of the run on a host; for a run in a bucket the newer local copy wins."""
    command = f"cat {here(workdir)}/{name}"
    if "://" in workdir:
        command = f"{command} 2>/dev/null || gcloud storage cat {shlex.quote(f'{workdir}/{name}')}"
    return in_code(settings, command)


def setup(settings: Settings, url: str, commit: str) -> str:
    """Install the code at `commit` and its packages; a second call changes nothing.

    It uses `git init` and `git fetch`, so it also completes a folder that an interrupted set-up left behind.
    """
    unpushed = fail(f"commit {commit[:12]} is not in {url}, or files changed on this host prevent its checkout")
    code = (
        f"mkdir -p {path(settings.repo_dir)} && cd {path(settings.repo_dir)} && git init -q && "
        f"{{ git remote set-url -- origin {shlex.quote(url)} 2>/dev/null || "
        f"git remote add -- origin {shlex.quote(url)}; }} && git fetch -q origin && "
        f"{{ git checkout -q --detach {shlex.quote(commit)} || {{ {unpushed}; }}; }}"
    )
    exclude = f"printf '%s\\n' {' '.join(map(shlex.quote, OURS))} > .git/info/exclude"
    return f"{WORKER}; {code} && {exclude} && {packages(settings)} && {say(f'{commit[:12]} is set up')}"


def packages(settings: Settings) -> str:
    """Install packages from the folder of the code; if the host has no suitable Python, uv installs one."""
    if settings.venv_activate:
        return f". {path(settings.venv_activate)}"
    candidates = f"{shlex.quote(settings.python_bin)} {PYTHONS}"
    find = (
        f'suitable() {{ for p in {candidates}; do "$p" -c {shlex.quote(SUITABLE)} 2>/dev/null && echo "$p" && return; '
        "done; return 1; }"
    )
    fetch = "python3 -m pip install --quiet --user uv && uv python install --quiet 3.12 && P=$(uv python find 3.12)"
    make = 'make --no-print-directory setup ACCELERATOR=tpu EXTRAS=huggingface PYTHON="$P"'
    return f'{{ export PATH="$HOME/.local/bin:$PATH"; {find}; P=$(suitable) || {{ {fetch}; }}; }} && {make}'


def protect_secrets(settings: Settings) -> str:
    """Set mode 600 on the file of secrets."""
    return in_code(settings, f"chmod 600 {ENV_FILE}")


def count_devices(settings: Settings) -> str:
    """Print how many devices the host sees, unless a run holds them."""
    program = 'import jax; print(f"{jax.device_count()} devices, {jax.local_device_count()} of them here")'
    count = f'n=$({python(settings)} -c {shlex.quote(program)}) && echo "worker $W: $n"'
    busy = 'echo "worker $W: a run uses the devices; they are not counted"'
    return in_environment(settings, f"{ALIVE}; if alive; then {busy}; else {count}; fi")
