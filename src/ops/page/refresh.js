'use strict';
// Puts fresh parts into the page every five seconds, so that place, filter and what is unfolded stay as they are.
(() => {
  const stale = document.getElementById('stale');
  let since = new Date();
  const refresh = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { cache: 'no-store', signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
      const open = [...document.querySelectorAll('details[open]')].map(each => each.id);
      for (const part of document.querySelectorAll('[data-live]')) {
        const other = fresh.getElementById(part.id);
        if (other && !part.contains(document.activeElement)) part.replaceWith(document.adoptNode(other));
      }
      for (const id of open) document.getElementById(id)?.setAttribute('open', '');
      document.title = fresh.title;
      since = new Date();
      stale.hidden = true;
    } catch {
      stale.textContent = 'No answer from the provisioner since ' + since.toLocaleTimeString() + ': what you see is old.';
      stale.hidden = false;
    }
  };
  setInterval(refresh, 5000);
  document.addEventListener('visibilitychange', refresh);
  document.getElementById('how').textContent = 'Refreshes every 5 s.';
})();
