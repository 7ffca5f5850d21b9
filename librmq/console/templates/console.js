// Lets a slider choose the time of the form beside it, and shows the page's content again every few seconds, while the page is visible and no form is being filled in.
"use strict";

const main = document.getElementById("main");

function isBusy() {
  const focused = document.activeElement;
  const inForm = focused && focused !== document.body && focused.closest("form, details");
  const isFilled = [...main.querySelectorAll("input")].some((field) => field.value !== field.defaultValue || field.checked !== field.defaultChecked)
    || [...main.querySelectorAll("select")].some((field) => field.selectedIndex !== Math.max([...field.options].findIndex((option) => option.defaultSelected), 0));
  return document.hidden || inForm || isFilled || main.querySelector("details[open]") || String(getSelection());
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

if (main.dataset.live) again();

const slider = document.getElementById("slider");
if (slider) {
  const time = document.getElementById("at");
  slider.hidden = slider.labels[0].hidden = false;
  slider.oninput = () => { time.value = new Date(Number(slider.value)).toISOString().slice(0, 19); };
  slider.onpointerup = () => time.form.requestSubmit();
}
