// Texts whose contrast is below WCAG's 4.5 to 1.
() => {
  const parts = (color) => color.match(/[\d.]+/g).map(Number);
  const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = parts(color).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((parts(color)[3] ?? 1) > 0.99) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const found = [];
  for (const e of document.querySelectorAll('main :is(h1, h2, h3, p, dd, dt, th, td, summary, .number)')) {
    if (!e.getClientRects().length || !e.textContent.trim()) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName} "${e.textContent.trim().slice(0, 40)}" has a contrast of ${ratio.toFixed(1)}`);
  }
  return found;
}
