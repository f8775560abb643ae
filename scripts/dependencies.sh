#!/bin/sh
# Installs the packages that a target of the Makefile needs, on Debian and
# Ubuntu, and nothing else.
#
#   scripts/dependencies.sh PURPOSE [--list]
#
# PURPOSE: build, quickstart, elastic, sweep, check, test, lint, bench or
# simulate.
#
# Before it installs, it says what is missing and why. If nothing is missing, it
# is quick and silent. --list prints the packages for this machine and installs
# nothing. On other systems it names what to install by hand, and ends without
# an error.
set -eu
case ${1-} in
-h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "$0"; exit ;;
esac
usage="usage: scripts/dependencies.sh build|quickstart|elastic|sweep|check|test|lint|bench|simulate [--list]"
purpose=${1-}

# Which groups of the table below each purpose takes.
case $purpose in
build) groups="build" ;;
quickstart) groups="build quickstart" ;;
elastic) groups="build elastic" ;;
sweep) groups="build quickstart sweep" ;;
check) groups="build format units" ;;
test) groups="build quickstart sweep format units test part" ;;
lint) groups="build format lint" ;;
bench) groups="build quickstart sweep format units test part bench" ;;
simulate) groups="simulate" ;;
*) echo "$usage; got '$purpose'" >&2; exit 2 ;;
esac

# Where: on all machines, on those with this processor or (!) another, or on releases after Debian 13 and on
# Ubuntu. If a release does not have a package of group "part", which serves one part of the tests alone, then
# these tests are skipped.
table() {
    cat <<'END'
build       gcc                     all      C compiler
build       g++                     all      links the C++ tokenizer library
build       make                    all      builds
build       pkg-config              all      finds libraries
build       libc6-dev               all      C library
build       libopenmpi-dev          all      MPI for several processes
build       openmpi-bin             all      mpirun
build       libibverbs-dev          all      RDMA networks
build       libdnnl-dev             x86_64   matrix products on the CPU (oneDNN)
build       libopenblas-dev         !x86_64  matrix products on the CPU
build       libjansson-dev          all      JSON
build       libxxhash-dev           all      checksums of checkpoints
build       libsentencepiece-dev    all      tokenizer
build       libabsl-dev             14+      included by the headers of SentencePiece 0.2.1
build       libssl-dev              all      encrypts packets (OpenSSL)
build       libcurl4-openssl-dev    all      asks etcd who takes part
quickstart  bible-kjv               all      the text that quickstart trains on
quickstart  sentencepiece           all      trains a tokenizer
quickstart  python3                 all      reads logs
quickstart  python3-matplotlib      all      plots
elastic     etcd-server             all      knows which ranks take part (etcd)
elastic     openssh-client          all      starts ranks on other hosts
sweep       python3-scipy           all      intervals (Student's t)
format      clang-format            all      formats C
units       libcmocka-dev           all      C unit tests
units       python3-pytest          all      runs the tests
units       python3-pytest-xdist    all      runs several at once
units       python3-numpy           all      references
units       sentencepiece           all      trains a tokenizer
units       python3-sentencepiece   all      the tokenizer to compare with
units       iproute2                all      network namespaces
lint        libcmocka-dev           all      C unit tests
lint        clang-tidy              all      finds faults in C
test        python3-setuptools      all      builds lossynet for Python
test        python3-pip             all      installs what results are compared with
test        python3-venv            all      virtual environments for that
part        xxhash                  all      checks checksums of checkpoints
part        xz-utils                all      unpacks the sources of a corpus
part        help2man                all      makes manual pages
part        nginx-light             all      a web service beside training
part        nftables                all      loses packets
part        ethtool                 all      switches off segmentation
part        etcd-server             all      knows who takes part (etcd)
part        openssh-server          all      starts ranks on hosts of tests (the system's own stays off)
part        slurmctld               all      a cluster of tests (Slurm)
part        slurmd                  all      its nodes
part        slurm-client            all      starts ranks on them
part        clang                   all      makes up packets and files (libFuzzer)
part        libclang-rt-dev         all      libFuzzer's library
part        libns3-dev              all      simulates a network (ns-3)
part        qemu-system-x86         x86_64   virtual machine with RDMA devices
part        busybox-static          x86_64   starts it
part        gcc-aarch64-linux-gnu   x86_64   compiles for another processor
part        g++-aarch64-linux-gnu   x86_64   links there
part        libc6-dev-arm64-cross   x86_64   its C library
part        qemu-user               x86_64   runs its programs
simulate    g++                     all      C++ compiler
simulate    make                    all      builds
simulate    libns3-dev              all      simulates a network (ns-3)
simulate    python3-numpy           all      statistics
simulate    python3-matplotlib      all      plots
bench       libopenblas0            all      another BLAS to compare with, and numpy's
END
}

processor=$(uname -m)
release=$(. /etc/os-release 2>/dev/null && echo "${ID:-}${VERSION_ID:-}" || true)
is_here() { # WHERE
    case $1 in
    all | "$processor") ;;
    !*) [ "${1#!}" != "$processor" ] ;;
    14+) case $release in debian1[0-3]) return 1 ;; esac ;;
    *) return 1 ;;
    esac
}
wanted() { # lines "package group what it is for", each package once
    table | while read -r group package where reason; do
        case " $groups " in *" $group "*) is_here "$where" && echo "$package $group $reason" ;; esac
    done | sort -u -k 1,1
}

if [ "${2:-}" = --list ]; then
    wanted | cut -d ' ' -f 1
    exit 0
fi
if ! command -v apt-get >/dev/null 2>&1; then
    echo "No apt-get here. If the next step misses something, install the equivalents of:"
    wanted | sed 's/\([^ ]*\).*/  \1/'
    exit 0
fi

missing=$(wanted | while read -r package group reason; do
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || echo "$package $group $reason"
done)
[ -n "$missing" ] || exit 0
needed=$(echo "$missing" | sed -n '/^[^ ]* part /!s/ .*//p' | tr '\n' ' ')
parts=$(echo "$missing" | sed -n 's/ part .*//p' | tr '\n' ' ')

sudo=
if [ "$(id -u)" != 0 ]; then
    sudo=sudo
    if ! { command -v sudo && sudo apt-get --version; } >/dev/null; then
        echo "scripts/dependencies.sh: neither root nor sudo; run as root: apt-get install $needed$parts" >&2
        exit 1
    fi
fi
echo "To $purpose, these packages of the distribution are missing and will be installed:"
echo "$missing" | while read -r package _ reason; do printf '  %-22s %s\n' "$package" "$reason"; done

log=$(mktemp)
install() { # PACKAGE...
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@" >>"$log" 2>&1
}
# shellcheck disable=SC2086
if ! $sudo apt-get update >"$log" 2>&1 || { [ -n "$needed" ] && ! install $needed; }; then
    tail -n 20 "$log" >&2
    echo "scripts/dependencies.sh: apt-get failed, see above; full output in $log" >&2
    exit 1
fi
case " $parts" in *" openssh-server "*) # Debian does not start it where this file is
    $sudo mkdir -p /etc/ssh
    $sudo touch /etc/ssh/sshd_not_to_be_run
    echo "  (To have this machine's own SSH server, remove /etc/ssh/sshd_not_to_be_run.)" ;;
esac
# shellcheck disable=SC2086
if [ -n "$parts" ] && ! install $parts; then
    for package in $parts; do
        install "$package" || echo "  Tests that use $package are skipped: $(grep '^E:' "$log" | tail -n 1)"
    done
fi
rm -f "$log"
