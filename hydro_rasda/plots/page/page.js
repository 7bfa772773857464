"use strict";
// Draws each figure when it comes near the window, in the light or dark colors of the reader's system.
const page = (function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = new Map(); // from the element to the figure that is drawn in it

  function template() {
    const [text, line] = dark.matches ? ["#e6e8ea", "#343a40"] : ["#212529", "#e3e6e9"];
    const title = {font: {size: 13}, standoff: 8};
    const axis = {title, gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true};
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: {color: text, family: "system-ui, sans-serif", size: 13},
        xaxis: axis,
        yaxis: axis,
        hoverlabel: {align: "left"},
        modebar: {bgcolor: "rgba(0,0,0,0)", color: "#868e96", activecolor: text},
      },
      data: {parcoords: [{rangefont: {color: "rgba(0,0,0,0)"}}]},
    };
  }

  function broken(text) {
    const halves = (line) => line.replace(/^(.{20,40}) (.+)$/, (_, first, rest) => `${first}<br>${broken(rest)}`);
    return text.split("<br>").map((line) => (line.length > 42 ? halves(line) : line)).join("<br>");
  }

  const AXES = 3; // axes of parallel coordinates on a phone, without the axis of the place

  // On a phone, long lines are broken: in legends, in labels beside bars, and in texts above a figure.
  function narrowed({data, layout}) {
    const above = (each) => each.xref === "paper" && each.yref === "paper";
    const annotations = (layout.annotations || []).map((a) => (above(a) ? {...a, text: broken(a.text)} : a));
    const lines = annotations.filter(above).map((a) => a.text.split("<br>").length);
    const t = Math.max(layout.margin.t, ...lines.map((count) => 18 * count + 10));
    const fewer = ({dimensions, ...trace}) => ({...trace, dimensions: [...dimensions.slice(0, -1).slice(0, AXES), dimensions.at(-1)]});
    const short = data.map((trace) => (trace.name ? {...trace, name: broken(trace.name)} : trace));
    const shown = short.map((trace) => (trace.dimensions ? fewer(trace) : trace));
    const yaxis = {...layout.yaxis};
    if (yaxis.type === "category" && yaxis.automargin) {
      yaxis.tickvals = yaxis.categoryarray.map((_, i) => i);
      yaxis.ticktext = yaxis.categoryarray.map((name) => name.replace(": ", "<br>"));
    }
    const margin = {...layout.margin, t, l: 45, r: data.some((trace) => trace.dimensions) ? 45 : 8};
    const named = shown.filter((trace) => trace.name && trace.showlegend !== false);
    const rows = named.flatMap((trace) => trace.name.split("<br>")).length;
    if (layout.showlegend === false || layout.legend.y < 1 || rows < 3) {
      return {data: shown, layout: {...layout, yaxis, annotations, margin}};
    }
    const [height, legend] = [layout.height + 20 * rows - 40, {...layout.legend, maxheight: 1}]; // a row is 20 high
    return {data: shown, layout: {...layout, yaxis, annotations, margin, height, legend}};
  }

  function draw(place) {
    const figure = place.clientWidth < 500 ? narrowed(figures.get(place)) : figures.get(place);
    // An unchanged `uirevision` keeps zoomed axes and hidden traces when the run goes on.
    const layout = {...figure.layout, template: template(), autosize: true, uirevision: "kept"};
    const config = {responsive: true, displaylogo: false};
    config.modeBarButtonsToRemove = ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d"];
    if (figure.layout.height < 320 || window.matchMedia("(hover: none)").matches) {
      config.displayModeBar = false;
    }
    place.style.height = `${figure.layout.height}px`;
    const fresh = !isDrawn(place);
    const drawn = Plotly.react(place, figure.data, layout, config);
    if (fresh) {
      place.on("plotly_click", ({points}) => trials.show(points[0]));
    }
    return drawn;
  }

  const isDrawn = (place) => place.classList.contains("js-plotly-plot");
  const drawAll = (which) => Promise.all([...figures.keys()].filter(which).map(draw));

  // Figures further down wait until they come near, so that the page opens at once.
  const waiting = new Map(); // from a place to the function that is called when it is near
  const near = new IntersectionObserver((entries) => {
    for (const {target} of entries.filter((entry) => entry.isIntersecting)) {
      near.unobserve(target);
      waiting.get(target)(target);
    }
  }, {rootMargin: "600px"});

  function whenNear(place, act) {
    waiting.set(place, act);
    near.unobserve(place); // so that the observer reports it again
    near.observe(place);
  }

  // Shows a figure, the table of trials, or the reason why there is none.
  function take(place, figure) {
    if (place.id === "trials") {
      trials.take(place, figure);
      return;
    }
    if (figure.note !== undefined) {
      forget(place);
      place.className = "note";
      place.style.height = "";
      place.textContent = figure.note;
      return;
    }
    if (!figures.has(place)) {
      place.className = "figure";
      place.textContent = "";
    }
    figures.set(place, figure);
    draw(place);
  }

  function forget(place) {
    if (figures.delete(place) && isDrawn(place)) {
      Plotly.purge(place);
    }
  }

  dark.addEventListener("change", () => drawAll(isDrawn));
  window.addEventListener("beforeprint", () => drawAll(() => true));
  return {take, whenNear, forget, hold: (place, figure) => figures.set(place, figure)};
})();
