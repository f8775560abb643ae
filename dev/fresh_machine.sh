#!/bin/bash
# fresh_machine.sh: what does someone see who has only git, make and a shell? Makes bare Debian machines in folders and
# runs the project's commands there.
#
#     dev/fresh_machine.sh [--quick] [--as root|user] [--run "COMMAND; ..."] [12|13|testing]...
#
#   (no option)  make quickstart, make check and make test, each on a bare machine of its own, on 12 and 13
#   --quick      STEPS=8 make quickstart and then make check on one machine: some 5 minutes for a release
#   --as         who calls them: root, or a user with sudo; both, if it is not given
#   --run        other commands, separated by semicolons, in turn on one machine
#
# A machine has what debootstrap calls minbase, and git, make, certificates and sudo. Its packages come from where this
# machine's come from (/etc/apt), and it uses the network of this machine. It sees the last commit, not what is changed
# since. All that is made lies in FRESH (/var/tmp/fresh_machine): bare machines, which are made anew after a week, and
# packages, so that a second run downloads less. Output goes to FRESH/*.log. Machines in use are removed at the end.
#
# The last lines are a table: release, caller, command, seconds, result. Exit code 0: every command ended with 0; 1: one
# did not; 2: wrong usage; 77: machines cannot be made here.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: dev/fresh_machine.sh [--quick] [--as root|user] [--run \"COMMAND; ...\"] [12|13|testing]..."
wrong() { echo "fresh_machine.sh: $1; $usage" >&2; exit 2; }
cannot() { echo "no bare machine: $1" >&2; exit 77; }

callers="root user" lines=$'make quickstart\nmake check\nmake test' releases=
while [ $# -gt 0 ]; do
    case $1 in
    --quick) lines="STEPS=8 make quickstart; make check" ;;
    --as) callers=${2:?"$usage"}; shift ;;
    --run) lines=${2:?"$usage"}; shift ;;
    12 | 13 | testing) releases="$releases $1" ;;
    *) wrong "got '$1'" ;;
    esac
    shift
done
case $callers in "root user" | root | user) ;; *) wrong "--as takes root or user, got '$callers'" ;; esac
[ -n "$releases" ] || releases="12 13"

[ "$(id -u)" = 0 ] || cannot "not root"
for tool in mmdebstrap git unshare; do
    command -v $tool >/dev/null || cannot "$tool is missing"
done
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null |
    grep -oE '^[^#]*(https?|file)://[^ ]*/debian/?( |$)' | grep -oE '(https?|file)://[^ ]*' | head -n 1) || true
[ -n "$mirror" ] || cannot "this machine's package sources name no mirror of Debian"

revision=$(git -C "$root" rev-parse HEAD)
FRESH=${FRESH:-/var/tmp/fresh_machine} # not in the build folder, where make reads all .d files
mkdir -p "$FRESH"
FRESH=$(cd "$FRESH" && pwd)
machine=
remove() { [ -z "$machine" ] || rm -rf --one-file-system "$machine"; }
trap remove EXIT
trap 'exit 1' INT TERM

# bare RELEASE: a bare machine, packed
bare() {
    local packed=$FRESH/$1.tar suite
    [ -z "$(find "$packed" -mtime -7 2>/dev/null)" ] || return 0
    case $1 in 12) suite=bookworm ;; 13) suite=trixie ;; *) suite=testing ;; esac
    mmdebstrap --variant=minbase --include=git,make,ca-certificates,sudo "$suite" "$FRESH/new.tar" \
        "deb [check-valid-until=no] $mirror $suite main" >"$FRESH/$1.made.log" 2>&1 ||
        cannot "mmdebstrap $suite failed, see $FRESH/$1.made.log: $(grep '^E:' "$FRESH/$1.made.log" | head -n 1)"
    mv "$FRESH/new.tar" "$packed"
}

# unpack RELEASE CALLER: sets machine to a folder with the unpacked machine and a clone of the last commit
unpack() {
    machine=$(mktemp -d -p "$FRESH")
    chmod 755 "$machine"
    tar -xf "$FRESH/$1.tar" -C "$machine" --exclude './dev/*'
    mkdir -p "$machine/home/user"
    git clone -q --no-hardlinks "$root" "$machine/home/user/clone"
    git -C "$machine/home/user/clone" reset -q --hard "$revision"
    cp /etc/resolv.conf "$machine/etc/"
    echo "127.0.0.1 localhost $(hostname)" >"$machine/etc/hosts"
    # Where this machine reaches the registries by a proxy, with a certificate of its own, or by a mirror.
    cp /etc/ssl/certs/ca-certificates.crt "$machine/etc/ssl/certs/"
    cp /etc/pip.conf "$machine/etc/" 2>/dev/null || true
    apt-config dump 2>/dev/null | grep -E '^Acquire::https?::(Proxy|CAInfo) ' >"$machine/etc/apt/apt.conf.d/90fresh" ||
        true
    if [ "$2" = user ]; then
        echo 'user:x:1000:1000::/home/user:/bin/bash' >>"$machine/etc/passwd"
        echo 'user:x:1000:' >>"$machine/etc/group"
        echo 'user:*:19000:0:99999:7:::' >>"$machine/etc/shadow"
        echo 'user ALL=(ALL) NOPASSWD: ALL' >"$machine/etc/sudoers.d/user"
        chown -R 1000:1000 "$machine/home/user"
    fi
}

# inside CALLER COMMAND: runs a command in the machine, with devices and processes of its own
inside() {
    local given
    given=$(env | grep -E '^(https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY|PIP_[A-Z_]*|SSL_CERT_FILE|STEPS)=' || true)
    mkdir -p "$FRESH/packages.$release"
    # shellcheck disable=SC2016
    env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin unshare --mount --pid --fork --kill-child sh -euc '
        machine=$1 packages=$2 caller=$3 command=$4 given=$5
        mount --bind "$machine" "$machine"
        mount --rbind /dev "$machine/dev"
        mount -t proc proc "$machine/proc"
        mount --rbind /sys "$machine/sys"
        mount -t tmpfs tmpfs "$machine/run"
        mount -t tmpfs -o mode=1777 tmpfs "$machine/dev/shm"
        mkdir -p "$machine/var/cache/apt/archives"
        mount --bind "$packages" "$machine/var/cache/apt/archives"
        home=/root path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
        [ "$caller" = root ] || home=/home/user path=/usr/local/bin:/usr/bin:/bin
        cd "$machine"
        IFS="
"
        set -f
        exec chroot "$machine" env -i HOME=$home PATH=$path TERM=dumb $given \
            $([ "$caller" = root ] || printf "%s\n" setpriv --pdeathsig keep --reuid=1000 --regid=1000 --clear-groups) \
            sh -c "cd /home/user/clone && $command"
    ' sh "$machine" "$FRESH/packages.$release" "$1" "$2" "$given"
}

# result LOG STATUS: a command's result in a few words
result() {
    local counted
    counted=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$1" | tail -n 1) || true
    [ -n "$counted" ] || counted=$(grep -vE '^ *$|^make' "$1" | tail -n 1 | cut -c 1-100)
    [ "$2" = 0 ] && echo "works: $counted" || echo "FAILS ($2): $counted"
}

table="" failed=0
for release in $releases; do
    bare "$release"
    for caller in $callers; do
        while read -r line; do
            unpack "$release" "$caller"
            IFS=';' read -ra commands <<<"$line"
            for command in "${commands[@]}"; do
                command=$(echo "$command" | sed 's/^ *//; s/ *$//')
                log="$FRESH/$release.$caller.$(echo "$command" | tr -cs 'A-Za-z0-9\n' _).log"
                echo "Debian $release, $caller: $command (output in $log)"
                started=$SECONDS status=0
                inside "$caller" "$command" >"$log" 2>&1 </dev/null || status=$?
                [ "$status" = 0 ] || failed=1
                table+="| $release | $caller | $command | $((SECONDS - started)) | $(result "$log" "$status") |"$'\n'
            done
            remove
            machine=
        done <<<"$lines"
    done
done
echo "revision $(git -C "$root" describe --always "$revision"), $(date -u +%F)"
printf '| Debian | caller | command | seconds | result |\n|---|---|---|---:|---|\n%s' "$table"
exit $failed
