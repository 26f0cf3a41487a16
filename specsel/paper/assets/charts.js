// Replaces each still picture by a live chart; redraws when theme or width changes and keeps the values of sliders.
(() => {
  const NARROW = 560;  // px: legends go below the chart, long labels and titles are cut and wrapped
  const dark = () => document.documentElement.dataset.theme === 'dark';
  const bound = spec => [spec, ...['layer', 'vconcat', 'hconcat', 'concat'].flatMap(key => spec[key] ?? [])]
    .flatMap(part => part.params ?? []).filter(param => param.bind && 'value' in param);
  const wrap = (text, width) => text.split(' ').reduce((lines, word) => {
    const last = lines[lines.length - 1];
    return last && (last + ' ' + word).length <= width ? [...lines.slice(0, -1), last + ' ' + word] : [...lines, word];
  }, []);
  const limitLabels = part => Object.entries(part ?? {}).forEach(([key, value]) => {
    if (key === 'labelLimit' && value > 110) part[key] = 110;
    else if (key === 'title' && typeof value === 'string' && value.length > 40) part[key] = wrap(value, 40);
    else if (value && typeof value === 'object' && key !== 'datasets') limitLabels(value);
  });
  function fit(spec, width) {
    spec.config = {...spec.config, background: 'transparent'};
    if (width >= NARROW) return spec;
    if (spec.title?.text) Object.assign(spec.title, {text: wrap(spec.title.text, 40)});
    limitLabels(spec);
    spec.config = {...spec.config, legend: {orient: 'bottom', columns: 2, labelLimit: 140}, title: {fontSize: 12, anchor: 'start'}};
    return spec;
  }
  async function draw(el) {
    el.spec ??= JSON.parse(el.querySelector('script').textContent);
    el.drawn = el.clientWidth;
    const spec = fit(structuredClone(el.spec), el.drawn), label = el.getAttribute('aria-label');
    if (el.view) bound(spec).forEach(param => { param.value = el.view.signal(param.name); });
    el.view?.finalize();
    const options = {theme: dark() ? 'dark' : undefined, config: {background: 'transparent'}, renderer: 'svg',
      actions: {source: false, compiled: false, editor: false, export: true}, tooltip: {theme: dark() ? 'dark' : 'light'}};
    el.view = (await vegaEmbed(el.querySelector('.vl-view'), spec, options)).view;
    el.querySelector('svg')?.setAttribute('aria-label', label);
    el.dataset.ready = '1';
  }
  const safely = el => draw(el).catch(error => { el.dataset.error = String(error); });
  const charts = [...document.querySelectorAll('.vl-chart')];
  charts.forEach(safely);
  new MutationObserver(() => charts.forEach(safely)).observe(document.documentElement, {attributes: true, attributeFilter: ['data-theme']});
  addEventListener('resize', () => charts.filter(el => (el.clientWidth < NARROW) !== (el.drawn < NARROW)).forEach(safely));
})();
