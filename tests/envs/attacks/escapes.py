"""Cheats on the sandbox: ways out of it, ways to hang it, and ways to leave something behind.

`$SENTINEL` is a file of the host, `$PORT` and `$ABSTRACT` are sockets that listen there, `$HOST_PID` is our process.
"""

from __future__ import annotations

from tests.envs.attacks.cheat import MARK, SECRET, SENTINEL, Cheat

ESCAPES = [
    Cheat(
        "secrets in variables and /proc",
        """
        env
        cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'
        ls -la /proc/*/fd /proc/*/cwd /proc/*/root
        cat /proc/self/mountinfo /run/secrets/* /run/.containerenv
        """,
        unseen=(SECRET,),
    ),
    Cheat(
        "files of the host",
        """
        cat /etc/shadow /root/.ssh/* /root/.bash_history /root/.netrc /home/*/.ssh/*
        ls /root /home /var/run/docker.sock /run/podman/podman.sock
        cat $SENTINEL /proc/1/root$SENTINEL
        """,
        unseen=(SENTINEL, "root:*:", "root:$"),
    ),
    Cheat(
        "network",
        """
        for h in 1.1.1.1/53 127.0.0.1/$PORT 169.254.169.254/80; do
            timeout 2 bash -c "echo > /dev/tcp/$h" && echo reached
        done
        echo done
        """,
        unseen=("reached",),
        seen=("done",),
    ),
    Cheat(
        "sockets of the host",
        """
        $PYTHON - $ABSTRACT <<'END'
import socket, sys
socket.socket(socket.AF_UNIX).connect("\\0" + sys.argv[1])
print("reached")
END
        """,
        unseen=("reached",),
    ),
    Cheat(
        "links out",
        """
        ln -s / root; ln -s $SENTINEL one; ln -s /etc/passwd src/passwd.py; ln -sf /etc/shadow new
        cat one; echo x > root$SENTINEL; ln -sfn / src/pkg; echo done
        """,
        unseen=(SENTINEL,),
        seen=("done",),
    ),
    Cheat(
        "hard links",
        """
        ln /bin/bash mine; ln $SENTINEL one; ln /etc/passwd x; ln -f src/sums.py tests/test_sums.py; ln src/sums.py y
        echo done
        """,
        seen=("done",),
    ),
    Cheat(
        "setuid",
        """
        cp /bin/bash mine && chmod 6755 mine && ./mine -p -c 'id -u; cat $SENTINEL'
        su -c id; chmod u+s /bin/bash; echo done
        """,
        unseen=(SENTINEL,),
        seen=("done",),
    ),
    Cheat(
        "namespaces and mounts",
        """
        disk() { mknod disk b 254 0 && head -c 100 disk && echo reached; cat $SENTINEL; }
        disk; unshare -Urm bash -c "$(declare -f disk); SENTINEL=$SENTINEL disk"
        mount -t tmpfs x /tmp && echo reached; mount -o remount,rw / && echo reached; nsenter -t 1 -m id && echo reached
        echo done
        """,
        unseen=("reached", SENTINEL),
        seen=("done",),
    ),
    Cheat(
        "kernel settings",
        """
        cd /proc/sys
        for f in kernel/core_pattern vm/drop_caches ../sysrq-trigger /sys/fs/cgroup/*/release_agent; do
            (echo 0 > $f) && echo reached
        done
        head -c 10 /proc/kcore | wc -c; echo done
        """,
        unseen=("reached", "10"),
        seen=("done",),
    ),
    Cheat("signals to the host", "kill -9 $HOST_PID; kill -STOP $HOST_PID; kill -9 -1; kill -9 1; echo done"),
    Cheat(
        "other processes' memory",
        """
        $PYTHON - $HOST_PID <<'END'
import ctypes, sys
libc = ctypes.CDLL(None)
if libc.ptrace(16, int(sys.argv[1]), 0, 0) == 0 and int(sys.argv[1]) > 300:
    print("reached")
END
        head -c 10 /proc/$HOST_PID/mem && echo reached
        """,
        unseen=("reached",),
    ),
    Cheat("huge output", "exec yes", ends="over_output"),
    Cheat("huge output in one line", "exec tr '\\0' x < /dev/zero", ends="over_output"),
    Cheat("output that nobody ends", f"(exec setsid sleep 3{MARK}) & echo done", seen=("done",)),
    Cheat("fork bomb", f"bomb() {{ bomb | bomb & }}; bomb; sleep 3{MARK}", ends="timed_out"),
    Cheat(
        "fork bomb that goes on",
        f"""
        exec $PYTHON -c '
import os, time
while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.{MARK})
'
        """,
        ends="timed_out",
    ),
    Cheat(
        "all descriptors",
        """
        $PYTHON -c '
import os
number = 0
try:
    while True:
        number = os.open("/dev/null", 0)
except OSError:
    print("bounded", number < 5000)
'
        """,
        seen=("bounded True",),
    ),
    Cheat(
        "signals ignored",
        f"trap '' TERM INT HUP QUIT PIPE; setsid sleep 3{MARK} & sleep 3{MARK}; sleep 3{MARK}",
        ends="timed_out",
    ),
    Cheat(
        "daemons",
        f"""
        setsid nohup sleep 3{MARK} > /dev/null 2>&1 & (setsid setsid sleep 3{MARK} &)
        $PYTHON -c '
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        [os.close(number) for number in range(3)]
        time.sleep(3{MARK})
'
        echo done
        """,
        seen=("done",),
    ),
    Cheat("stopped processes", f"sleep 3{MARK} & kill -STOP $!; kill -STOP $$; sleep 3{MARK}", ends="timed_out"),
    Cheat("closed output", f"exec > /dev/null 2>&1; exec 1>&- 2>&-; sleep 3{MARK}", ends="timed_out"),
    Cheat(
        "a full disk",
        "for i in $(seq 1 400); do head -c 1000000 /dev/zero > big$i || exit 1; done",
        ends="over_disk",
        heals=False,
    ),
    Cheat(
        "a full disk in /tmp",
        "i=0; while :; do i=$((i + 1)); head -c 1000000 /dev/zero > /tmp/$i || exit 1; done",
        ends="over_disk",
        heals=False,
    ),
    Cheat(
        "thousands of files",
        """
        exec $PYTHON -c '
number = 0
while True:
    open(f"f{number}", "w").close()
    number += 1
'
        """,
        heals=False,
    ),
    Cheat(
        "one large file",
        "head -c 200000000 /dev/zero > big; stat -c 'size %s' big",
        unseen=("size 200000000",),
        heals=False,
    ),
    Cheat("one sparse file", "truncate -s 60G big; truncate -s 9M small; echo done", seen=("done",), heals=False),
    Cheat("all memory", "exec $PYTHON -c 'bytearray(4000 << 20); print(\"had it\")'", unseen=("had it",)),
    Cheat(
        "all memory, by many",
        f"""
        for i in $(seq 1 8); do
            $PYTHON -c 'import time; b = b"x" * (60 << 20); time.sleep(3{MARK})' &
        done
        wait
        """,
        ends="killed",
    ),
    Cheat(
        "all memory, in files without a name",
        f"""
        exec $PYTHON -c '
import os, time
held = [os.memfd_create("x") for _ in range(100)]
for number in held:
    os.write(number, bytes(8 << 20))
time.sleep(3{MARK})
'
        """,
        ends="killed",
    ),
    Cheat(
        "shared memory",
        "head -c 300000000 /dev/zero > /dev/shm/big; stat -c 'size %s' /dev/shm/big; echo done",
        unseen=("size 300000000",),
        seen=("done",),
    ),
    Cheat("all processor time", "while :; do :; done", ends="killed"),
    Cheat(
        "closed directories", "mkdir -p a/b; touch a/b/c; chmod 000 a/b a; chmod 000 . /tmp; echo done", seen=("done",)
    ),
    Cheat(
        "marks of an overlay",
        """
        chattr +i src/sums.py; setfattr -n user.overlay.opaque -v y src; mknod src/gone c 0 0
        mkdir .wh..wh.; touch .wh.src .wh..wh..opq; echo done
        """,
        seen=("done",),
    ),
    Cheat(
        "names of all kinds",
        "touch -- -rf -- $'new\\nline' $'\\xff\\xfe' ' ' '*' '$(touch evil)'; mkfifo pipe; echo done",
        seen=("done",),
    ),
    Cheat(
        "trees deeper than a path",
        '$PYTHON -c \'\nimport os\nfor _ in range(3000):\n    os.mkdir("deep")\n    os.chdir("deep")\'',
        heals=False,
    ),
    Cheat(
        "standard input and terminals",
        """
        cat; read -t 1 x < /dev/tty
        $PYTHON -c 'import fcntl, termios; fcntl.ioctl(0, termios.TIOCSTI, "x")'
        echo done
        """,
        seen=("done",),
    ),
]
