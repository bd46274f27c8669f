#!/usr/bin/env bash
# Runs a command in this checkout's virtual environment, made or updated first when needed.
#
#   launch/local.sh COMMAND [ARGUMENT ...]
#   launch/local.sh python -m experiments.sweep --experiment=k_sweep_32k
#   launch/local.sh pytest
#
# The environment holds what requirements.lock says and the checkout itself, editable. It is .venv
# in the checkout, or the folder that XMOD_VENV names. Uses uv when present, else venv and pip. The
# command runs from the checkout's root.
set -euo pipefail

say() { printf 'launch/local.sh: %s\n' "$*" >&2; }
refuse() { say "$@"; exit 2; }

# Whether $1 is a Python that the lock file is for. Run it to know: a version manager leaves names
# on PATH that start nothing.
suits() {
  local test='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
  "$1" -I -c "$test" >/dev/null 2>&1
}

find_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11; do
    if suits "$name"; then printf '%s\n' "$name"; return; fi
  done
  refuse "no Python 3.11, 3.12 or 3.13 on PATH: install one and start again"
}

# Everything that the environment depends on, kept in it as the stamp of a finished install. The
# root is part of it because an editable install points there.
wanted() { printf '%s\n' "$root"; cat requirements.lock setup.cfg pyproject.toml; }

is_ready() {
  [[ -f $stamp && "$(<"$stamp")" == "$(wanted)" ]] && suits "$venv/bin/python"
}

# Takes the lock until this script ends or execs; the kernel frees it however the script ends.
take_lock() {
  command -v flock >/dev/null || return 0
  exec 9>"$venv/.xmod_lock"
  ! flock -n 9 || return 0
  say "waiting for another start, which is making $venv"
  flock 9 || say "cannot lock $venv; going on without"
}

make_environment() {
  local python
  python=$(find_python)
  say "making a virtual environment in $venv; the first time takes some minutes"
  : >"$unfinished"
  if command -v uv >/dev/null; then
    "$python" -I -m venv --without-pip "$venv"
  elif ! "$python" -I -m venv "$venv"; then
    refuse "$python cannot make virtual environments: install its venv package, or uv"
  fi
}

# What the installers are started by: without the variables that would have them install elsewhere,
# otherwise, or nothing. Where packages come from and how to get there stay the user's.
start_installer=(env -u PYTHONPATH)
for name in "${!PIP_@}"; do
  case ${name#PIP_} in
    *INDEX* | FIND_LINKS | TRUSTED_HOST | *CERT* | *PROXY* | *TIMEOUT | RETRIES | *CACHE*) ;;
    CONFIG_FILE | KEYRING_PROVIDER | USE_FEATURE | USE_DEPRECATED | LOG | NO_COLOR) ;;
    *) start_installer+=(-u "$name") ;;
  esac
done
for name in {BUILD_CONSTRAINT,CONSTRAINT,DIRECTORY,DRY_RUN,EXCLUDE,EXCLUDE_NEWER,NO_BINARY} \
  {NO_BUILD,NO_BUILD_ISOLATION,OVERRIDE,PREFIX,PROJECT,PYTHON,REQUIRE_HASHES,SYSTEM_PYTHON} \
  {TARGET,WORKING_DIRECTORY}; do
  start_installer+=(-u "UV_$name")
done

# `install ARGUMENT ...` as pip takes them. -I keeps PYTHONPATH from passing for the environment.
install() {
  if command -v uv >/dev/null; then
    "${start_installer[@]}" uv pip install --quiet --python "$venv/bin/python" "$@" && return
    # It does not read pip's settings, such as a site's mirror or certificates.
    say "uv failed, see above; trying pip"
  fi
  # An environment that uv filled has no pip.
  "$venv/bin/python" -I -c 'import pip' 2>/dev/null ||
    "${start_installer[@]}" "$venv/bin/python" -I -m ensurepip >/dev/null
  # A site's pip.conf may ask for the user's own folder, where no environment looks.
  "${start_installer[@]}" "$venv/bin/python" -I -m pip install -qq --disable-pip-version-check \
    --no-user "$@"
}

# The checkout itself. An editable install writes beside the sources; where it cannot, a copy serves
# for its name and version: commands run in the checkout and import what stands there.
install_checkout() {
  if [[ -w . ]]; then
    install --no-deps --editable .
    return
  fi
  local copy=$venv/.xmod_source
  rm -rf -- "$copy"
  mkdir -- "$copy"
  cp -R -- setup.cfg pyproject.toml README.md LICENSE xmod_jax "$copy"
  chmod -R u+w -- "$copy"
  install --no-deps --force-reinstall "$copy"
}

# Clears what a killed first install left, and refuses a folder that is not ours to fill.
inspect_folder() {
  if [[ -f $unfinished ]]; then
    say "an install in $venv was cut short; starting over"
    find "$venv" -mindepth 1 -maxdepth 1 ! -name '.xmod_*' -exec rm -rf {} +
  elif [[ -L $venv/bin/python || -e $venv/bin/python ]]; then
    suits "$venv/bin/python" ||
      refuse "$venv holds no working Python 3.11, 3.12 or 3.13: remove it, or set XMOD_VENV"
  elif [[ -n "$(find "$venv" -mindepth 1 ! -name '.xmod_*' -print -quit)" ]]; then
    refuse "$venv holds files but no virtual environment: set XMOD_VENV to another folder"
  fi
}

update_environment() {
  mkdir -p -- "$venv" 2>/dev/null && [[ -w $venv ]] ||
    refuse "cannot write to $venv: set XMOD_VENV to a folder that can be written"
  take_lock
  ! is_ready || return 0
  inspect_folder
  # An update keeps what else was installed there, such as a plugin for an accelerator.
  rm -f -- "$stamp"
  [[ -e $venv/bin/python ]] || make_environment
  say "installing the packages of requirements.lock"
  if ! { install -r requirements.lock && install_checkout; }; then
    say "the install failed, see above; start again to retry"
    exit 1
  fi
  wanted >"$stamp.new"
  mv -- "$stamp.new" "$stamp"
  rm -f -- "$unfinished"
}

(($#)) || refuse "usage: launch/local.sh COMMAND [ARGUMENT ...], such as launch/local.sh pytest"
# For another Python; for another shell; it keeps `python -m` from the checkout that it runs from.
unset PYTHONHOME CDPATH PYTHONSAFEPATH
venv=${XMOD_VENV:-}
[[ -z $venv || $venv == /* || $venv == *://* ]] || venv=$PWD/$venv
script=$(readlink -f -- "${BASH_SOURCE[0]}")
root=$(dirname -- "$(dirname -- "$script")")
cd -- "$root"
[[ -f requirements.lock && -f setup.cfg && -f pyproject.toml ]] ||
  refuse "$root is not a whole checkout: clone it again"
venv=${venv:-$root/.venv}
# A colon ends a folder of PATH; and an object store is no folder.
[[ $venv != *:* ]] || refuse "$venv cannot hold an environment, for its colon: set XMOD_VENV"
stamp=$venv/.xmod_stamp
unfinished=$venv/.xmod_unfinished

is_ready || update_environment
exec 9>&-
export PATH="$venv/bin:$PATH" VIRTUAL_ENV=$venv
exec -- "$@"
