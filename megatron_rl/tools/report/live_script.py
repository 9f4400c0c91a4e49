"""The script that keeps a page of `megatron-rl report --live` up to date."""

LIVE_SCRIPT = """
(() => {
  const EVERY_MS = 5000;
  let tag = '';
  const show = text => {
    const fresh = new DOMParser().parseFromString(text, 'text/html');
    for (const part of [...fresh.querySelectorAll('main > section')]) {
      const old = document.getElementById(part.id);
      // What a reader looks for among the samples stays as it is.
      if (part.id === 'samples-part' || old === null || old.innerHTML === part.innerHTML) continue;
      const open = [...old.querySelectorAll('details')].map(it => it.open);
      old.replaceWith(document.adoptNode(part));
      part.querySelectorAll('details').forEach((it, number) => { it.open = open[number] ?? false; });
    }
    document.dispatchEvent(new Event('fresh'));
  };
  const refresh = async () => {
    let said = 'live';
    try {
      const answer = await fetch('/report', { cache: 'no-store', headers: tag ? { 'If-None-Match': tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get('ETag');
        show(await answer.text());
      }
    } catch {
      said = 'the server of this page has ended, so it stays as it is';
    }
    document.getElementById('live').textContent = said;
    setTimeout(refresh, EVERY_MS);
  };
  setTimeout(refresh, EVERY_MS);
})();
"""
