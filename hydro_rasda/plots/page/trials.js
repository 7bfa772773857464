"use strict";
// The table of trials: a click on a column's head sorts it, words filter it, and at most 100 rows are shown at once.
const trials = (function () {
  const ROWS = 100;
  const state = {head: "", down: false, filter: "", from: 0, chosen: null};
  let heads = []; // the first column has the numbers of trials
  let rows = []; // the best trial first
  let parts = null;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.append(...children); // texts become text nodes
    return made;
  }

  function button(text, turned) {
    const made = element("button", {type: "button"}, text);
    made.addEventListener("click", () => turn(turned()));
    return made;
  }

  // In both directions, numbers come before texts, and empty cells come last.
  const rank = (cell) => (typeof cell === "number" ? 0 : cell === "" ? 2 : 1);
  function compared(a, b) {
    if (rank(a) !== rank(b)) {
      return rank(a) - rank(b);
    }
    const order = rank(a) === 0 ? a - b : String(a).localeCompare(b);
    return state.down ? -order : order;
  }

  // Small numbers as Python writes them: 8.671e-05.
  const isSmall = (cell) => typeof cell === "number" && cell !== 0 && Math.abs(cell) < 1e-4;
  const told = (cell) => (isSmall(cell) ? cell.toExponential().replace(/-(\d)$/, "-0$1") : String(cell));

  // The word "lr=0.01" matches the whole value of a column; any other word matches a part of a cell.
  const isIn = (row) => (word) => row.some((cell, i) => {
    const text = told(cell).toLowerCase();
    return text.includes(word) || `${heads[i].toLowerCase()}=${text}` === word;
  });

  function shown() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => words.every(isIn(row)));
    const at = heads.indexOf(state.head);
    return at < 0 ? found : found.sort((a, b) => compared(a[at], b[at]));
  }

  function render() {
    const found = shown();
    state.from = Math.min(state.from, ROWS * Math.floor(Math.max(0, found.length - 1) / ROWS));
    const end = Math.min(found.length, state.from + ROWS);
    parts.body.replaceChildren(...found.slice(state.from, end).map((row) => {
      const marked = row[0] === state.chosen ? {"aria-current": "true", tabindex: "-1"} : {};
      return element("tr", marked, ...row.map((cell) => element("td", {}, told(cell))));
    }));
    const order = state.down ? "descending" : "ascending";
    [...parts.head.children].forEach((head, i) => { head.ariaSort = heads[i] === state.head ? order : null; });
    const some = found.length > ROWS ? `${state.from + 1} to ${end} of ` : "";
    parts.count.textContent = `${some}${found.length}${found.length < rows.length ? ` of ${rows.length}` : ""} trials`;
    parts.back.disabled = state.from === 0;
    parts.on.disabled = end === found.length;
    parts.back.hidden = parts.on.hidden = found.length <= ROWS;
  }

  function turn(changes) {
    Object.assign(state, changes);
    render();
  }

  function headOf(name) {
    const sorted = () => ({head: name, down: state.head === name && !state.down, from: 0});
    return element("th", {scope: "col"}, button(name, sorted));
  }

  function build(place) {
    const field = element("input", {type: "search", placeholder: "adamw lr=0.01", "aria-label": "Filter trials"});
    const [head, body, count] = [element("tr"), element("tbody"), element("span", {role: "status"})];
    const back = button("Previous", () => ({from: state.from - ROWS}));
    const on = button("Next", () => ({from: state.from + ROWS}));
    field.value = state.filter;
    field.addEventListener("input", () => turn({filter: field.value, from: 0}));
    const table = element("table", {}, element("thead", {}, head), body);
    const box = element("div", {class: "scroll", role: "region", "aria-label": "Trials", tabindex: "0"}, table);
    place.replaceChildren(element("div", {class: "tools"}, field, count, back, on), box);
    parts = {place, field, head, body, count, back, on};
  }

  function take(place, data) {
    if (parts === null || parts.place !== place) {
      build(place);
      heads = [];
    }
    if (heads.join("\n") !== data.heads.join("\n")) {
      parts.head.replaceChildren(...data.heads.map(headOf));
    }
    heads = data.heads;
    rows = data.columns[0].map((_, i) => data.columns.map((column) => column[i]));
    render();
  }

  // Marks the trial that the hover box of a point names; does nothing if a bar stands for several trials.
  function show({customdata, text, data}) {
    const [, number] = [customdata, text, data.hovertemplate].join("<br>").match(/(?:^|<br>)trial (\d+)/) || [];
    if (parts === null || number === undefined) {
      return;
    }
    state.chosen = Number(number);
    const at = () => shown().findIndex((row) => row[0] === state.chosen);
    if (at() < 0) {
      parts.field.value = state.filter = "";
    }
    turn({from: ROWS * Math.floor(Math.max(0, at()) / ROWS)});
    const line = parts.body.querySelector("[aria-current]");
    if (line !== null) {
      line.focus({preventScroll: true});
      line.scrollIntoView({block: "center"});
    }
  }

  return {take, show};
})();
