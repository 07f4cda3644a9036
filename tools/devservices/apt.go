package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// While this file exists and fails with 101, the maintainer scripts of packages
// start no service.
const policyFile = "/usr/sbin/policy-rc.d"

// aptInstall installs Debian packages without starting anything.
func aptInstall(ctx context.Context, packages []string) (err error) {
	if _, missing := exec.LookPath("apt-get"); missing != nil || os.Geteuid() != 0 {
		return errors.New("it is not on this machine, and apt-get can only be used by root on Debian")
	}
	allow, err := forbidServices()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, allow()) }()
	if err := aptGet(ctx, "update", "-qq"); err != nil {
		return err
	}
	return aptGet(ctx, append([]string{"install", "-y", "-qq", "--no-install-recommends"}, packages...)...)
}

// forbidServices keeps installed services from being started until allow is
// called. A policy that the machine already has is left alone.
func forbidServices() (allow func() error, err error) {
	f, err := os.OpenFile(policyFile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if errors.Is(err, os.ErrExist) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	_, err = f.WriteString("#!/bin/sh\nexit 101\n")
	return func() error { return os.Remove(policyFile) }, errors.Join(err, f.Close())
}

func aptGet(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get %s: %w\n%s", args[0], err, out)
	}
	return nil
}
