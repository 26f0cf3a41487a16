// Replaces each still picture by a live chart; redraws when the theme changes and keeps the values of sliders.
(() => {
  const dark = () => document.documentElement.dataset.theme === 'dark';
  const names = spec => [spec, ...['layer', 'vconcat', 'hconcat', 'concat'].flatMap(key => spec[key] ?? [])]
    .flatMap(part => part.params ?? []).filter(param => param.bind && 'value' in param);
  async function draw(el) {
    el.spec ??= JSON.parse(el.querySelector('script').textContent);
    const spec = structuredClone(el.spec), label = el.getAttribute('aria-label');
    if (el.view) names(spec).forEach(param => { param.value = el.view.signal(param.name); });
    el.view?.finalize();
    const options = {theme: dark() ? 'dark' : undefined, config: {background: 'transparent'}, renderer: 'svg',
      actions: {source: false, compiled: false, editor: false, export: true}, tooltip: {theme: dark() ? 'dark' : 'light'}};
    const result = await vegaEmbed(el.querySelector('.vl-view'), spec, options);
    el.view = result.view;
    el.querySelector('svg')?.setAttribute('aria-label', label);
    el.dataset.ready = '1';
  }
  const all = () => document.querySelectorAll('.vl-chart').forEach(el => draw(el).catch(error => { el.dataset.error = String(error); }));
  all();
  new MutationObserver(all).observe(document.documentElement, {attributes: true, attributeFilter: ['data-theme']});
})();
