# A package that ran the daemon as another user is being replaced, such as the original's, which runs it as root. Files and
# helper of that set-up may need that user, so the unit stays what it was until an administrator moves.
old_unit=
for folder in /usr/lib/systemd/system /lib/systemd/system; do
    [ -f "$folder/choria-provisioner.service" ] && old_unit=$folder/choria-provisioner.service
done
kept_unit=/etc/systemd/system/choria-provisioner.service
if [ -n "$old_unit" ] && [ ! -e "$kept_unit" ] && ! grep -q '^User=choria-provisioner$' "$old_unit"; then
    {
        echo "# Kept from the package that was here before, so that an upgrade changes nothing."
        echo "#"
        echo "# The unit of this package runs as user choria-provisioner and may do little else than it must. To move to it:"
        echo "#   chgrp -R choria-provisioner /etc/choria-provisioner && chmod -R g+rX /etc/choria-provisioner"
        echo "#   chown choria-provisioner: /var/log/choria-provisioner.log"
        echo "#   rm $kept_unit && systemctl daemon-reload && systemctl restart choria-provisioner"
        echo "# More in /usr/share/doc/choria-provisioner/MOVING.md."
        # systemd takes this word no more, and writes to the journal anyway.
        grep -v '^Standard[A-Za-z]*=syslog$' "$old_unit"
        echo
        echo "# Added: a daemon that ended by itself is started again."
        echo "[Service]"
        echo "Restart=on-failure"
        echo "RestartSec=5"
        echo "RestartPreventExitStatus=2 77 78"
        echo "TimeoutStopSec=60"
        echo "KillMode=mixed"
        echo "# For the commands that ask the daemon."
        echo "RuntimeDirectory=choria-provisioner"
        echo "RuntimeDirectoryMode=0750"
    } >"$kept_unit"
    echo "choria-provisioner: kept the unit of the former package as $kept_unit, which says how to move"
fi
