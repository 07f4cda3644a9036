package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestConfigFromEnv(t *testing.T) {
	for _, c := range []struct {
		orders, broker, database, amqp string
		want                           config
		problem                        string
	}{
		{"", "", "db", "mq", config{1000, "rabbitmq", "db", "mq"}, ""},
		{"50000", "memory", "db", "", config{50000, "memory", "db", ""}, ""},
		{"10", "rabbitmq", "db", "mq", config{10, "rabbitmq", "db", "mq"}, ""},
		{"9", "", "db", "mq", config{}, "ORDERS"},
		{"many", "", "db", "mq", config{}, "ORDERS"},
		{"", "kafka", "db", "mq", config{}, "BROKER"},
		{"", "", "", "mq", config{}, "DATABASE_URL"},
		{"", "", "db", "", config{}, "AMQP_URL"},
	} {
		for name, value := range map[string]string{"ORDERS": c.orders, "BROKER": c.broker, "DATABASE_URL": c.database, "AMQP_URL": c.amqp} {
			t.Setenv(name, value)
		}
		got, err := configFromEnv()
		switch {
		case c.problem == "" && (err != nil || got != c.want):
			t.Errorf("%+v: got %+v, %v", c, got, err)
		case c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)):
			t.Errorf("%+v: the error is %v", c, err)
		}
	}
}

// losePayments makes every new database lose the payments of 500 cents.
const losePayments = `
	create function public.lose() returns trigger language plpgsql as 'begin return null; end';
	create function public.spoil() returns event_trigger language plpgsql as $$begin
		if to_regclass('public.payments') is not null
			and not exists (select from pg_trigger where tgrelid = to_regclass('public.payments')) then
			create trigger lose before insert on public.payments for each row when (new.amount = 500) execute function public.lose();
		end if;
	end$$;
	create event trigger spoil on ddl_command_end when tag in ('CREATE TABLE') execute function public.spoil();`

// TestLostEffectsGiveAnExitStatus runs the program on a server that loses effects. Components are killed, and
// the standard error tells of it in words of the program, not in those of the killed.
func TestLostEffectsGiveAnExitStatus(t *testing.T) {
	t.Parallel()
	server := testenv.PrivatePostgres(t, devserver.PostgresOptions{})
	conn, err := pgx.Connect(t.Context(), strings.Replace(server.URL(), "/postgres?", "/template1?", 1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Exec(t.Context(), losePayments); err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var out, status bytes.Buffer
	program := exec.CommandContext(t.Context(), self)
	program.Env = append(os.Environ(), programVariable+"=1", "ORDERS=30", "BROKER=memory", "DATABASE_URL="+server.URL())
	program.Stdout, program.Stderr = &out, &status
	err = program.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the program ends with %v, want the exit status 1", err)
	}
	var got report
	if err := json.Unmarshal([]byte(lastLine(out.String())), &got); err != nil {
		t.Fatalf("last line: %v\n%s%s", err, &status, &out)
	}
	if got.Orders != 30 || got.Lost != 10 {
		t.Errorf("want 10 of 30 effects lost:\n%s", &out)
	}
	if strings.Contains(status.String(), "level=") {
		t.Errorf("a killed component is heard:\n%s", &status)
	}
}
