# In /var/log only root can make it.
log=/var/log/choria-provisioner.log
if [ ! -e "$log" ]; then
    : >"$log" && chown choria-provisioner:choria-provisioner "$log" && chmod 0640 "$log"
fi
