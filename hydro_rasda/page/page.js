"use strict";
// Draws each figure from the JSON beside it, in the colours that the reader's system asks for.
const page = (function () {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const figures = new Map(); // by the element that each is drawn in

  function template() {
    const [text, line] = dark.matches ? ["#e6e8ea", "#343a40"] : ["#212529", "#e3e6e9"];
    const title = {font: {size: 13}};
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

  function draw(place) {
    const figure = figures.get(place);
    // What the reader has zoomed into or hidden stays so when a run goes on.
    const layout = {...figure.layout, template: template(), autosize: true, uirevision: "kept"};
    if (place.clientWidth < 500) {
      layout.margin = {...layout.margin, l: 45, r: 8};
    }
    const config = {responsive: true, displaylogo: false};
    config.modeBarButtonsToRemove = ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d"];
    if (figure.layout.height < 320 || window.matchMedia("(hover: none)").matches) {
      config.displayModeBar = false;
    }
    place.style.height = `${figure.layout.height}px`;
    return Plotly.react(place, figure.data, layout, config);
  }

  const isDrawn = (place) => place.classList.contains("js-plotly-plot");
  const drawAll = (which) => Promise.all([...figures.keys()].filter(which).map(draw));

  // Those further down are drawn when they come near, so that the page opens at once.
  const near = new IntersectionObserver((entries) => {
    for (const {target} of entries.filter((entry) => entry.isIntersecting)) {
      near.unobserve(target);
      draw(target);
    }
  }, {rootMargin: "600px"});

  function hold(held) {
    const place = document.getElementById(held.dataset.for);
    figures.set(place, JSON.parse(held.textContent));
    if (isDrawn(place)) {
      draw(place);
    } else {
      near.observe(place);
    }
  }

  document.querySelectorAll("script[data-for]").forEach(hold);
  dark.addEventListener("change", () => drawAll(isDrawn));
  window.addEventListener("beforeprint", () => drawAll(() => true));
  return {hold, forget: (place) => figures.delete(place)};
})();
