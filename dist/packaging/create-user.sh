getent group choria-provisioner >/dev/null || groupadd --system choria-provisioner
getent passwd choria-provisioner >/dev/null ||
    useradd --system --gid choria-provisioner --home-dir /var/lib/choria-provisioner --no-create-home \
        --shell /usr/sbin/nologin --comment "Choria Provisioner" choria-provisioner
