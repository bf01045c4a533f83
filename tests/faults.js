// What a picture of the page would show: sentences, none of a page that is as it should be. What is inside something that
// scrolls sideways may be wider than the page.
() => {
  const faults = [];
  const wide = document.documentElement.clientWidth;
  const words = (e) => `${e.tagName} "${e.textContent.trim().slice(0, 40)}"`;
  const scrolls = (e) => {
    for (; e; e = e.parentElement) if (getComputedStyle(e).overflowX === 'auto') return true;
    return false;
  };
  if (document.documentElement.scrollWidth > wide) faults.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  for (const e of document.querySelectorAll('main *')) {
    if (e.closest('svg') || scrolls(e)) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > wide + 1 || box.left < -1)) faults.push(`${words(e)} leaves the page`);
    const hides = getComputedStyle(e).overflowX === 'hidden';
    if (hides && e.scrollWidth > e.clientWidth + 1) faults.push(`${words(e)} is cut off`);
  }
  for (const text of document.querySelectorAll('svg text')) {
    const box = text.getBoundingClientRect();
    const frame = text.closest('.js-plotly-plot, section')?.getBoundingClientRect();
    if (!frame || !box.width) continue;
    const sides = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
    if (Math.max(...sides) > 1) faults.push(`"${text.textContent}" is cut off at the edge of its plot`);
  }
  return faults;
}
