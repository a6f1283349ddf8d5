kept_unit=/etc/systemd/system/choria-provisioner.service
if [ -f "$kept_unit" ] && grep -q '^# Kept from the package that was here before' "$kept_unit"; then
    rm -f "$kept_unit"
fi
