#!/usr/bin/env bash
# The inner part of dist/install-test: runs as root under systemd in a container made for it, and changes that as it likes.
set -Eeuo pipefail
cd /scene
trap 'echo "FAILED at line $LINENO: $BASH_COMMAND"; systemctl status choria-provisioner --no-pager --full; tail -n 20 "$log"' ERR

etc=/etc/choria-provisioner
log=/var/log/choria-provisioner.log
unit=choria-provisioner.service
kept=/etc/systemd/system/$unit
passed=0

# Says what holds now.
ok() { passed=$((passed + 1)) && echo "ok: $*"; }

# Waits until a command succeeds; half a minute is for a busy machine.
soon() {
    local try
    for try in {1..300}; do "$@" >/dev/null 2>&1 && return; sleep 0.1; done
    echo "not within 30 seconds: $*"
    return 1
}

has() { [ "$(stat -c '%a %U:%G' "$1")" = "$2" ] || { echo "$1 has $(stat -c '%a %U:%G' "$1") and not $2" && return 1; }; }

# Settings and keys of a site, as its administrator would make them.
configure() {
    sed -i -e 's/^monitor_port: .*/monitor_port: 9999/' -e 's/^  jwt: false/  jwt: true/' -e 's/^token: .*/token: s3cret/' \
        -e 's/^#logfile: .*/logfile: \/var\/log\/choria-provisioner.log/' -e 's/^#site: .*/site: lab/' \
        -e 's/^#jwt_verify_cert: .*/jwt_verify_cert: \/scene\/verify.pem/' "$etc/choria-provisioner.yaml"
    sed -i 's/^#identity = .*/identity = p.example.net/' "$etc/choria.cfg"
    echo "made by the administrator" >"$etc/own.pem"
    use_helper /usr/share/choria-provisioner/helpers/sample.sh
}

use_helper() {
    local mode=exec
    [[ $1 != */persistent.* ]] || mode=persistent
    sed -i -e "s|^helper: .*|helper: $1|" -e "s/^#*helper_mode: .*/helper_mode: $mode/" "$etc/choria-provisioner.yaml"
}

# Lets practice nodes come up until all are provisioned. Each fleet has another key, and the same names: only a daemon that was
# just started knows none of them.
provision() {
    ./fleet --jwt-key-out /scene/verify.pem --nats nats://127.0.0.1:4222 --nodes 20 --faults gone=1,wrong-token=1 --until-done --timeout 60 >/scene/fleet.log ||
        { cat /scene/fleet.log && return 1; }
}

main_pid() { systemctl show --property MainPID --value "$unit"; }
user_of_daemon() { ps -o user:32= -p "$(main_pid)"; }

# Runs a command in the place of the daemon, under all that the unit allows and forbids.
in_unit() {
    mkdir -p /run/systemd/system/$unit.d
    printf '[Service]\nType=oneshot\nRestart=no\nExecStart=\nExecStart=%s\n' "$*" >/run/systemd/system/$unit.d/zz-test.conf
    systemctl daemon-reload
    local code=0
    systemctl restart "$unit" 2>/dev/null || code=1
    rm /run/systemd/system/$unit.d/zz-test.conf
    systemctl daemon-reload
    systemctl reset-failed "$unit" 2>/dev/null || true
    return $code
}

# Answers of the broker name its clients; ours has the name of its caller.
connected_as() { curl -s http://127.0.0.1:8222/connz | grep -qF "\"name\": \"$1\""; }

systemd-run --quiet --unit=broker nats-server -a 127.0.0.1 -p 4222 -m 8222
soon curl -sf http://127.0.0.1:8222/varz
# There must be a key at the start.
openssl genrsa 2048 2>/dev/null | openssl rsa -pubout -out verify.pem 2>/dev/null
chmod 0644 verify.pem

### The deb #######################################################################################

dpkg --install this.deb >/dev/null
has $etc "750 root:choria-provisioner"
has $etc/choria-provisioner.yaml "640 root:choria-provisioner"
has $etc/choria.cfg "640 root:choria-provisioner"
has $log "640 choria-provisioner:choria-provisioner"
has /usr/sbin/choria-provisioner "755 root:root"
[ "$(getent passwd choria-provisioner | cut -d: -f6,7)" = /var/lib/choria-provisioner:/usr/sbin/nologin ]
! systemctl is-active --quiet "$unit" && ! systemctl is-enabled --quiet "$unit"
ok "the deb makes a user and folders, and starts nothing"

# shellcheck disable=SC2016
[ "$(bash -c '. /usr/share/bash-completion/completions/choria-provisioner; COMP_WORDS=(choria-provisioner disc); COMP_CWORD=1
    _choria_provisioner; echo "${COMPREPLY[*]}"')" = discover ]
zcat /usr/share/man/man8/choria-provisioner.8.gz | grep -x '.Cm check' >/dev/null
ok "shells complete commands, and the manual is there"

systemd-analyze verify "/usr/lib/systemd/system/$unit"
configure
systemctl enable --now "$unit" 2>/dev/null
provision
[ "$(user_of_daemon)" = choria-provisioner ]
grep -q '^CapEff:\s*0*$' "/proc/$(main_pid)/status" && grep -q '^NoNewPrivs:\s*1$' "/proc/$(main_pid)/status"
grep -q '"msg":"Provisioned ' "$log"
ok "practice nodes are provisioned under the user of the unit, without any capability"
connected_as p.example.net
ok "the broker sees the name that it would see of root"

choria-provisioner status | grep -q "^State       provisioning for "
[ "$(stat -c '%a %U:%G' /run/choria-provisioner/admin.sock)" = "660 choria-provisioner:choria-provisioner" ]
[ "$(systemctl show --property WatchdogUSec --value "$unit")" = 2min ]
status_text() { systemctl show --property StatusText --value "$unit"; }
said() { status_text | grep -q "$1"; }
soon said "^provisioning: .* provisioned$"
ok "systemd and the admin socket know what the daemon does"

old_pid=$(main_pid)
sed -i 's/^#*workers: .*/workers: 3/' "$etc/choria-provisioner.yaml"
systemctl reload "$unit"
grep -q '"msg":"Settings reloaded, changed: workers"' $log
sed -i 's/^workers: .*/workers: many/' "$etc/choria-provisioner.yaml"
! systemctl reload "$unit" 2>/dev/null
grep -q "\"level\":\"error\".*yaml:[0-9]*: workers: " $log && grep -q '"msg":"Settings not reloaded' $log
soon said "; the last reload was refused: "
sed -i 's/^workers: .*/workers: 2/' "$etc/choria-provisioner.yaml"
systemctl reload "$unit"
systemctl is-active --quiet "$unit" && [ "$(main_pid)" = "$old_pid" ]
choria-provisioner status --json | grep -q '"workers_max":2'
ok "systemctl reload takes good settings and refuses wrong ones, and the daemon goes on"

mkdir -p /run/systemd/system/$unit.d
printf '[Service]\nWatchdogSec=2\nRestartSec=0\n' >/run/systemd/system/$unit.d/watchdog.conf
systemctl daemon-reload
systemctl restart "$unit"
old_pid=$(main_pid)
kill -STOP "$old_pid"
started_again() { [ "$(main_pid)" != "$old_pid" ] && [ "$(main_pid)" != 0 ] && systemctl is-active --quiet "$unit"; }
soon started_again
rm -r /run/systemd/system/$unit.d
systemctl daemon-reload
systemctl restart "$unit"
ok "the watchdog starts a daemon again that hangs"

install -o choria-provisioner -g choria-provisioner -m 0600 /dev/null /var/log/choria-provisioner/audit.log
echo "{}" >/var/log/choria-provisioner/audit.log
logrotate --force /etc/logrotate.d/choria-provisioner
has /var/log/choria-provisioner/audit.log "600 choria-provisioner:choria-provisioner"
grep -q "{}" /var/log/choria-provisioner/audit.log.1
has $log "640 choria-provisioner:choria-provisioner"
soon grep -q '"msg":"Opened the log again"' $log
grep -q '"msg":"Provisioned ' $log.1 && ! grep -q '"msg":"Provisioned ' $log
ok "logrotate moves the logs, and the daemon writes another"

for helper in /usr/share/choria-provisioner/helpers/{sample,persistent}.*; do
    use_helper "$helper"
    systemctl restart "$unit"
    provision
    ok "${helper##*/} runs under the unit"
done

echo "choria-provisioner ALL=(root) NOPASSWD: /usr/bin/id" >/etc/sudoers.d/test
chmod 0440 /etc/sudoers.d/test
echo secret >/home/secret
chmod 0644 /home/secret
cat >/scene/jit.py <<'PY'
import mmap
mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
PY
declare -A needs=([sudo]="/usr/bin/sudo -n /usr/bin/id" [home]="/bin/cat /home/secret" [jit]="/usr/bin/python3 /scene/jit.py")
for name in sudo home jit; do
    ! in_unit "${needs[$name]}"
    mkdir -p /etc/systemd/system/$unit.d
    cp /usr/share/choria-provisioner/drop-ins/$name.conf /etc/systemd/system/$unit.d/
    in_unit "${needs[$name]}"
    rm -r /etc/systemd/system/$unit.d
    ok "the drop-in $name.conf allows what the unit forbids"
done
systemctl daemon-reload
systemctl start "$unit"

sha256sum $etc/* >/scene/before
old_pid=$(main_pid)
dpkg --install --force-confdef --force-confold later.deb >/dev/null
sha256sum --check --quiet /scene/before
grep -q '^# changed' $etc/choria-provisioner.yaml.dpkg-dist
systemctl is-active --quiet "$unit" && [ "$(main_pid)" != "$old_pid" ]
provision
ok "an upgrade keeps changed settings, and the daemon goes on"

dpkg --remove choria-provisioner >/dev/null
! systemctl is-active --quiet "$unit" && [ ! -e /usr/sbin/choria-provisioner ]
sha256sum --check --quiet /scene/before
dpkg --install --force-confdef --force-confold this.deb >/dev/null
sha256sum --check --quiet /scene/before
systemctl start "$unit"
provision
ok "a removal keeps the settings for the next installation"

dpkg --purge choria-provisioner >/dev/null 2>&1
[ ! -e $etc/choria-provisioner.yaml ] && [ ! -e $etc/choria.cfg ] && [ ! -e $log ] && [ ! -e $log.1 ] && [ -e $etc/own.pem ]
! systemctl is-active --quiet "$unit"
ok "a purge removes what the package and the daemon made, and nothing else"
rm -rf $etc
userdel choria-provisioner

### The image #####################################################################################

# As a builder of images reads it, with settings mounted.
copies=$(awk '$1 == "COPY" { print $2, $3 }' Containerfile)
while read -r from to; do install -D "context/$from" "image$to"; done <<<"$copies"
command=$(sed -n -E 's/^(ENTRYPOINT|CMD) //p' Containerfile | python3 -c 'import json, sys
for line in sys.stdin: print("\n".join(json.loads(line)))')
mapfile -t command <<<"$command"
mkdir -p image/etc/choria-provisioner
cp verify.pem image/etc/choria-provisioner/
cat >image/etc/choria-provisioner/choria-provisioner.yaml <<'YAML'
# Nothing else is there that could be started.
helper: /usr/sbin/choria-provisioner
choria_insecure: true
token: s3cret
monitor_port: 9999
features: {jwt: true}
jwt_verify_cert: /etc/choria-provisioner/verify.pem
YAML
printf 'identity = p.example.net\nplugin.choria.middleware_hosts = 127.0.0.1:4222\n' >image/etc/choria-provisioner/choria.cfg
systemd-run --quiet --unit=image chroot --userspec="$(awk '$1 == "USER" { print $2 }' Containerfile)" /scene/image "${command[@]}"
soon curl -sf http://127.0.0.1:9999/readyz
connected_as p.example.net
systemctl stop image
ok "the daemon runs in an image that holds nothing else"

### The rpm #######################################################################################

# Nothing on this machine came from an rpm, so the few packages that it needs are not known to be there.
rpm="rpm --nodeps"

$rpm --install this.rpm
has $etc "750 root:choria-provisioner"
has $etc/choria-provisioner.yaml "640 root:choria-provisioner"
has $etc/choria.cfg "640 root:choria-provisioner"
has $log "640 choria-provisioner:choria-provisioner"
! systemctl is-active --quiet "$unit" && ! systemctl is-enabled --quiet "$unit"
configure
systemctl start "$unit"
provision
[ "$(user_of_daemon)" = choria-provisioner ]
ok "the rpm makes the same, and the daemon works under the user of the unit"

sha256sum $etc/*.* >/scene/before
old_pid=$(main_pid)
$rpm --upgrade later.rpm 2>/dev/null
sha256sum --check --quiet /scene/before
[ -e $etc/choria-provisioner.yaml.rpmnew ]
systemctl is-active --quiet "$unit" && [ "$(main_pid)" != "$old_pid" ]
provision
[ ! -e "$kept" ]
ok "an upgrade of the rpm keeps changed settings, and the daemon goes on"

cp $etc/choria-provisioner.yaml /scene/settings.yaml
$rpm --erase choria-provisioner 2>/dev/null
! systemctl is-active --quiet "$unit" && [ ! -e /usr/sbin/choria-provisioner ]
cmp /scene/settings.yaml $etc/choria-provisioner.yaml.rpmsave
ok "a removal of the rpm keeps the settings"
rm -rf $etc
userdel choria-provisioner

### From the original #############################################################################

$rpm --install original.rpm
# Settings of the administrator, some of which only root can read.
cp /scene/settings.yaml $etc/choria-provisioner.yaml
printf 'identity = p.example.net\nplugin.choria.middleware_hosts = localhost:4222\n' >$etc/choria.cfg
chmod 0600 $etc/*
use_helper "$etc/helper"
printf '#!/bin/sh\n[ "$(id -u)" -eq 0 ] && exec /usr/share/choria-provisioner/helpers/sample.sh\n' >$etc/helper
chmod 0700 $etc/helper
echo "from before" >$log
systemctl start "$unit"
sha256sum $etc/* >/scene/before
cp $etc/choria-provisioner.yaml /scene/settings.yaml
$rpm --upgrade this.rpm 2>/dev/null
sha256sum --check --quiet /scene/before
grep -q "from before" $log
grep -q '^# Kept from the package that was here before' "$kept"
systemd-analyze verify "$kept"
systemctl is-active --quiet "$unit"
[ "$(user_of_daemon)" = root ]
provision
ok "an upgrade from the original keeps user, files and helper"

kill -ABRT "$(main_pid)"
soon systemctl is-active --quiet "$unit"
provision
ok "the kept unit starts a daemon again that ended by itself"

# As its head says.
printf '#!/bin/sh\nexec /usr/share/choria-provisioner/helpers/sample.sh\n' >$etc/helper
sed -n 's/^#   //p' "$kept" >/scene/move.sh
grep -q '^rm ' /scene/move.sh
bash -e /scene/move.sh
[ ! -e "$kept" ] && [ "$(user_of_daemon)" = choria-provisioner ]
provision
connected_as p.example.net
ok "the steps in the kept unit move it to the user of the package"

$rpm --erase choria-provisioner 2>/dev/null
cmp /scene/settings.yaml $etc/choria-provisioner.yaml.rpmsave
ok "its removal keeps the settings, too"

echo "$passed passed, 0 failed"
