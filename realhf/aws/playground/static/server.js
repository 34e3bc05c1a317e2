// What the page asks of the server. Every failure is a Problem whose text can be shown.

export class Problem extends Error {
  constructor(status, body) {
    super(body.message ?? body.detail ?? `the server answered ${status}`);
    this.status = status;
    this.code = body.code ?? "";
  }
}

let csrf = "";

export async function ask(path, body) {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-CSRF-Token": csrf },
    body: JSON.stringify(body),
  };
  let reply;
  try {
    reply = await fetch(`/web/${path}`, { credentials: "same-origin", ...options });
  } catch {
    throw new Problem(0, { message: "the server does not answer", code: "UNREACHABLE" });
  }
  const data = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Problem(reply.status, data);
  return data;
}

/** Say that this page goes, so that its seat becomes free. Nobody waits for the answer. */
export function sayAway() {
  fetch("/web/away", { method: "POST", keepalive: true, credentials: "same-origin", headers: { "Content-Type": "application/json", "X-CSRF-Token": csrf }, body: "{}" }).catch(() => {});
}

export async function beginSession() {
  const session = await ask("session");
  csrf = session.csrf ?? "";
  return session;
}
