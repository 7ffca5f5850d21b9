// Lets a slider choose the time of the form beside it, sorts tables by the column that is clicked, and shows the page's content again every few seconds, while the page is visible and no form is being filled in.
"use strict";

const main = document.getElementById("main");

function isBusy() {
  const focused = document.activeElement;
  const inForm = focused && focused !== document.body && focused.closest("form, details");
  const isFilled = [...main.querySelectorAll("input")].some((field) => field.value !== field.defaultValue || field.checked !== field.defaultChecked)
    || [...main.querySelectorAll("select")].some((field) => field.selectedIndex !== Math.max([...field.options].findIndex((option) => option.defaultSelected), 0));
  return document.hidden || inForm || isFilled || main.querySelector("details[open]") || String(getSelection());
}

const orders = new Map();  // by the table's name: the number of the column, and 1 or -1

function makeSortable() {
  for (const table of main.querySelectorAll("table")) {
    const name = table.parentElement.getAttribute("aria-label");
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (table.tBodies[0].rows.length < 2 || head.matches(".plot") || !head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.onclick = () => {
        const [last, direction] = orders.get(name) ?? [];
        orders.set(name, [column, last === column ? -direction : head.matches(".number") ? -1 : 1]);
        sort(table, ...orders.get(name));
      };
      head.replaceChildren(button);
    });
    if (orders.has(name)) sort(table, ...orders.get(name));
  }
}

function sort(table, column, direction) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column]?.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const keyOf = (row) => {
    const cell = row.cells[column];
    const amount = Number(cell.dataset.order ?? (cell.matches(".number") ? cell.textContent.replaceAll(",", "") : NaN));
    return Number.isNaN(amount) ? cell.textContent : amount;
  };
  const compare = (first, second) => typeof first === typeof second ? (first < second ? -1 : first > second ? 1 : 0) : typeof first === "number" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row), row]);
  rows.sort(([first], [second]) => direction * compare(first, second));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

async function refresh() {
  if (!isBusy()) {
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById("main");
      if (answer.ok && fresh && !isBusy()) {
        const scrolled = [...main.querySelectorAll(".wide")].map((region) => region.scrollLeft);
        main.replaceChildren(...fresh.childNodes);
        makeSortable();
        main.dataset.live = fresh.dataset.live ?? main.dataset.live;
        main.querySelectorAll(".wide").forEach((region, place) => { region.scrollLeft = scrolled[place] ?? 0; });
      }
    } catch {
      // The application is being restarted: the next round tries again.
    }
  }
  again();
}

function again() {
  setTimeout(refresh, Number(main.dataset.live) * 1000);
}

makeSortable();
if (main.dataset.live) again();

const slider = document.getElementById("slider");
if (slider) {
  const time = document.getElementById("at");
  slider.hidden = slider.labels[0].hidden = false;
  slider.oninput = () => { time.value = new Date(Number(slider.value)).toISOString().slice(0, 19); };
  slider.onpointerup = () => time.form.requestSubmit();
}
